"""What mails tell and questions ask: kinds of facts, and how people word them.

Invariant: every sentence that settles a fact names its subject and its value, so one mail is enough to know
it; sentences that only ask (``doubt``) never settle anything.

Places in braces: ``about`` (a project, person or vendor), ``item``, ``new`` and ``old`` values.
"""

from dataclasses import dataclass
from typing import Literal

AnswerKind = Literal["date", "number", "person", "firm", "place"]
"""How an answer is compared; see `examples.email_research.checking`."""


@dataclass(frozen=True, slots=True)
class Topic:
    """One kind of fact.

    Attributes:
        name: of the topic.
        kind: what a question about it is counted as.
        answer: how answers are compared.
        keywords: what to search for beside the subject.
        subjects: subject lines.
        announce: the fact is told for the first time.
        change: it is another one from now on.
        doubt: somebody heard something else (``old`` is what they heard) and asks.
        settle: the answer to that: ``new`` stands.
        questions: how it is asked for.
    """

    name: str
    kind: str
    answer: AnswerKind
    keywords: str
    subjects: tuple[str, ...]
    announce: tuple[str, ...]
    change: tuple[str, ...]
    doubt: tuple[str, ...]
    settle: tuple[str, ...]
    questions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Fact:
    """What a thread tells.

    Attributes:
        topic: its kind.
        about: a project's, person's or vendor's name.
        item: what is ordered, where that belongs to the fact.
        answer: the value that counts, as `checking.is_right` expects it.
        rivals: other values that the thread names.
        source: which of the inbox's mails settles it, in the order in which they were written.
    """

    topic: Topic
    about: str
    item: str
    answer: str
    rivals: tuple[str, ...]
    source: int


def filled(text: str, about: str, item: str, new: str = "", old: str = "") -> str:
    """A sentence with its places filled, beginning with a capital."""
    told = text.format(about=about, item=item, new=new, old=old)
    return told[0].upper() + told[1:]


DEADLINE = Topic(
    name="deadline",
    kind="when",
    answer="date",
    keywords="delivery {item}",
    subjects=("{about}: delivery of the {item}", "{item} for {about}", "Delivery date, {about}"),
    announce=(
        "The {item} for {about} will be delivered on {new}.",
        "We have a delivery date for the {item} of {about}: {new}.",
        "For {about}, delivery of the {item} is agreed for {new}.",
        "{about} gets its {item} on {new}, the delivery slot is booked.",
    ),
    change=(
        "Delivery of the {item} for {about} has moved from {old} to {new}.",
        "Forget {old}: the {item} for {about} now have delivery on {new}.",
        "The delivery date of the {item} for {about} is changed again. It is {new} and not {old}.",
        "New delivery slot for the {item} of {about}, since {old} does not work: {new}.",
    ),
    doubt=(
        "Somebody told me that delivery of the {item} for {about} is on {old}. Is that so?",
        "Did I hear right that the {item} for {about} come on {old}?",
    ),
    settle=(
        "No, delivery of the {item} for {about} stays on {new}. The other date was a mix-up.",
        "That was about something else. The {item} for {about} are delivered on {new}, as planned.",
    ),
    questions=(
        "When will the {item} for {about} be delivered?",
        "On which date is delivery of the {item} for {about} due, after all changes?",
        "What is the current delivery date of the {item} for {about}?",
    ),
)

LEAD = Topic(
    name="lead",
    kind="who",
    answer="person",
    keywords="lead",
    subjects=("{about}: who leads", "Project lead of {about}", "{about} team"),
    announce=(
        "{new} leads {about} from now on.",
        "It is decided that {new} will be the project lead of {about}.",
        "Please welcome {new} as the lead of {about}.",
        "The lead for {about} is {new}, with all that comes with it.",
    ),
    change=(
        "{old} hands {about} over. {new} leads the project from Monday.",
        "A change at {about}: {new} takes over as lead from {old}.",
        "{new} is the new project lead of {about}, since {old} moves to other work.",
        "As {old} will be away for long, {new} leads {about} from here on.",
    ),
    doubt=(
        "Is it true that {old} is to be the lead of {about}?",
        "People say that {old} leads {about} now. Can you confirm?",
    ),
    settle=(
        "No, {new} leads {about} and that does not change.",
        "That is only talk. The project lead of {about} is {new}.",
    ),
    questions=(
        "Who leads {about} now?",
        "Who is the project lead of {about}, after all changes?",
        "Which person has the lead of {about} at present?",
    ),
)

BUDGET = Topic(
    name="budget",
    kind="how_much",
    answer="number",
    keywords="approved budget",
    subjects=("{about}: budget", "Budget of {about}", "Money for {about}"),
    announce=(
        "The budget of {about} is approved at {new}.",
        "Finance has approved a budget of {new} for {about}.",
        "{about} has its budget: {new} are approved.",
        "The board approved {new} as budget for {about}.",
    ),
    change=(
        "The approved budget of {about} is no longer {old} but {new}.",
        "Finance has changed the budget of {about} from {old} to {new}, which is approved.",
        "After the review, the approved budget of {about} went from {old} to {new}.",
        "Budget news: {about} now has {new} approved in place of {old}.",
    ),
    doubt=(
        "In the corridor they say that the budget of {about} is {old} now. Do you know more?",
        "Was the budget of {about} set to {old}? I saw that figure on a slide.",
    ),
    settle=(
        "The slide was a draft. The approved budget of {about} remains {new}.",
        "No. The budget of {about} is {new}, approved and unchanged.",
    ),
    questions=(
        "How large is the approved budget of {about} in euros?",
        "What is the budget of {about}, after all revisions?",
        "How much money is approved for {about} as things stand?",
    ),
)

VENDOR = Topic(
    name="vendor",
    kind="decision",
    answer="firm",
    keywords="{item} chosen supplier",
    subjects=("{about}: supplier of the {item}", "Who supplies the {item} for {about}", "{item}, decision"),
    announce=(
        "We have chosen {new} as supplier of the {item} for {about}.",
        "Decision on {about}: the {item} come from {new}, the chosen supplier.",
        "The {item} for {about} go to {new}, which is the supplier that we chose.",
        "{new} is chosen to supply the {item} for {about}.",
    ),
    change=(
        "We withdraw from {old}. The chosen supplier of the {item} for {about} is now {new}.",
        "On second thoughts, for the {item} of {about} we have chosen {new} and not {old} as supplier.",
        "{old} cannot deliver, so {new} is chosen as supplier of the {item} for {about}.",
        "After the second round, {new} and no longer {old} is chosen to supply the {item} for {about}.",
    ),
    doubt=(
        "I read that {old} supplies the {item} for {about}. Has that been chosen?",
        "Are the {item} for {about} going to {old} after all?",
    ),
    settle=(
        "Nothing has changed: {new} is the chosen supplier of the {item} for {about}.",
        "No, we have chosen {new} for the {item} of {about}, and the supplier has signed.",
    ),
    questions=(
        "Which supplier was finally chosen for the {item} of {about}?",
        "Who supplies the {item} for {about} according to the final decision?",
        "Which company was chosen in the end to supply the {item} for {about}?",
    ),
)

VENUE = Topic(
    name="venue",
    kind="where",
    answer="place",
    keywords="review meeting",
    subjects=("{about} review meeting", "Where we meet for {about}", "Review of {about}"),
    announce=(
        "The review meeting of {about} takes place in {new}.",
        "I have booked {new} for the review meeting of {about}.",
        "For the {about} review meeting we have {new}.",
    ),
    change=(
        "The review meeting of {about} moves from {old} to {new}.",
        "{old} is taken, so the review meeting of {about} takes place in {new}.",
        "Please do not go to {old}: the {about} review meeting is in {new}.",
    ),
    doubt=(
        "The calendar says {old} for the review meeting of {about}. Is it there?",
        "Do we meet in {old} for the {about} review?",
    ),
    settle=(
        "The calendar is wrong, the review meeting of {about} takes place in {new}.",
        "No, we stay in {new} for the review meeting of {about}.",
    ),
    questions=(
        "Where does the review meeting of {about} take place?",
        "In which place is the {about} review meeting held, after all changes?",
    ),
)

QUANTITY = Topic(
    name="quantity",
    kind="how_many",
    answer="number",
    keywords="ordered {item}",
    subjects=("{about}: order of {item}", "How many {item} for {about}", "Order, {about}"),
    announce=(
        "For {about} we have ordered {new} {item}.",
        "The order for {about} is out: {new} {item}.",
        "I ordered {new} {item} for {about} this morning.",
    ),
    change=(
        "The order for {about} was changed from {old} to {new} {item}.",
        "We ordered too few {item} for {about} with {old}, it is {new} now.",
        "Correction of the order for {about}: {new} {item} and not {old}.",
    ),
    doubt=(
        "On the order form for {about} I read {old} {item}. Can that be?",
        "Have you ordered {old} {item} for {about}?",
    ),
    settle=(
        "The form is out of date. Ordered are {new} {item} for {about}.",
        "No, {new} {item} are ordered for {about}, and that is what we need.",
    ),
    questions=(
        "How many {item} are ordered for {about}?",
        "How many {item} does the order for {about} come to, after all corrections?",
    ),
)

EXTENSION = Topic(
    name="extension",
    kind="multi_hop",
    answer="number",
    keywords="phone extension",
    subjects=("Phone extension of {about}", "New desk, new phone", "Reaching {about}"),
    announce=(
        "{about} can be reached under phone extension {new}.",
        "For the phone list: {about} has extension {new}.",
        "The phone extension of {about} is {new}.",
    ),
    change=(
        "{about} has moved desks, the phone extension is no longer {old} but {new}.",
        "Please correct the phone list: {about} has extension {new} in place of {old}.",
    ),
    doubt=("Is {old} still the phone extension of {about}?",),
    settle=("No, {about} has phone extension {new}.",),
)

TOWN = Topic(
    name="town",
    kind="multi_hop",
    answer="place",
    keywords="based",
    subjects=("About {about}", "{about}, who they are", "Visiting {about}"),
    announce=(
        "{about} is based in {new}, with a workshop of some forty people.",
        "I looked them up: {about} is based in {new}, where the workshop is, too.",
        "{about} have their workshop in {new} and are based there since they began.",
    ),
    change=(
        "{about} has left {old} and is now based in {new}, workshop and all.",
        "Note that {about} moved: the workshop is based in {new} and no longer in {old}.",
    ),
    doubt=("Is {about} still based in {old}?",),
    settle=("No, {about} is based in {new}, the workshop with it.",),
)

MULTI_HOP = {
    "extension": (
        "What is the phone extension of the person who leads {about}?",
        "Under which phone extension do I reach the current project lead of {about}?",
    ),
    "town": (
        "In which town is the supplier of the {item} for {about} based?",
        "Where is the company based that was finally chosen for the {item} of {about}?",
    ),
}
"""Questions that need two facts: who leads (or supplies), and then something about them."""
