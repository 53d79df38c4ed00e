"""The words of the generated mailboxes: firms, people, projects, what they buy, what they chat about.

Invariant: plain data. Words that a question may ask for (names of people, firms, towns) are in no other list,
so that they appear in a mail only where they were put.
"""

import tomllib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Firm:
    """Whose inbox it is, and what the firm's work is about.

    Attributes:
        inbox: the id of the inbox.
        name: of the firm.
        domain: of its addresses.
        adjectives: first words of project names.
        nouns: second words of project names.
        items: what projects order from vendors.
        rooms: where people meet.
        chatter: sentences of the trade that say nothing anybody asks about.
    """

    inbox: str
    name: str
    domain: str
    adjectives: tuple[str, ...]
    nouns: tuple[str, ...]
    items: tuple[str, ...]
    rooms: tuple[str, ...]
    chatter: tuple[str, ...]


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _lines(text: str) -> tuple[str, ...]:
    return tuple(line.strip() for line in text.strip().splitlines())


def _firms(path: Path) -> tuple[Firm, ...]:
    return tuple(
        Firm(**{name: value if isinstance(value, str) else tuple(value) for name, value in firm.items()})
        for firm in tomllib.loads(path.read_text(encoding="utf-8"))["firms"]
    )


FIRMS = _firms(Path(__file__).with_name("firms.toml"))

FIRST_NAMES = _words("""
    Aaliyah Adrian Agnes Ahmed Aiko Alasdair Alma Amara Anders Anjali Antonio Astrid Beatriz Bogdan
    Brigitte Carlos Catarina Cedric Chiara Dagny Daniela Darius Dilek Dmitri Edda Eamon Elif Emeka Erik
    Esther Farah Felipe Fiona Frieda Gaspard Giulia Gunnar Hannah Haruto Hedda Henrik Ibrahim Ilse Ines
    Ivana Jasper Jelena Joaquin Jonas Kaia Kamal Katya Klaus Lakshmi Lars Leila Ludmila Magnus Malika
    Marek Mei Mikael Miriam Nadia Niamh Nikhil Noor Odile Olga Omar Otto Paloma Pavel Petra Priya
    Quentin Rafael Rania Renske Rhys Rosa Ruben Sabine Samuel Sanna Sergei Shira Sigrid Soren Stella
    Sunniva Tariq Teodor Thandi Tomoko Ulrich Valeria Vikram Wanda Wim Xavier Yara Yusuf Zainab Zoltan
""")
"""No first name is another list's word."""

LAST_NAMES = _words("""
    Abernathy Adeyemi Ahlgren Almeida Andersson Aydin Baptiste Barczak Bellweather Bergqvist Bielak
    Bjornstad Blanchard Borges Brandvold Cavallaro Chaudhary Christodoulou Cienfuegos Crowther Dahlberg
    Delacroix Demir Dombrowski Eastwood Ekholm Elmasry Engstrom Espinoza Falkenberg Ferreira Fitzgibbon
    Fjeldstad Fonseca Fukuda Gallagher Georgiou Gjertsen Grabowski Gupta Haddad Hagemann Halvorsen
    Hashimoto Hellstrom Hernandez Holmgren Hrabal Ibarra Ikeda Isaksen Ivanovic Jablonski Jankowski
    Jokinen Kallio Kaminski Karlsen Kasapoglu Kessler Khoury Kimura Kowalczyk Krishnan Kuznetsov
    Lagerlof Larocque Lindqvist Lombardi Lundgren Mahmoud Makinen Marchetti Mbeki Mendoza Moreau
    Mukherjee Nakagawa Navarro Nieminen Nordstrom Novotny Nyberg Obradovic Okafor Olofsson Oyelaran
    Pacheco Paulsen Pedersen Petrovic Pietersen Quintero Rahman Rasmussen Ravnborg Reinholt Ribeiro
    Rosenthal Ruiz Saarinen Salonen Santangelo Schreiber Sepulveda Sjoberg Skovgaard Soderlund Sokolova
    Stavros Svendsen Szymanski Takahashi Tanaka Thorvaldsen Tikkanen Torvinen Tremblay Ueda Ustinov
    Valdez Vanderveen Vasquez Virtanen Volkov Wallenius Wesolowski Westergaard Wiklund Yamamoto Yilmaz
    Zabel Zanetti Zielinski
""")

VENDOR_NAMES = _words("""
    Aldermark Bexfield Calloway Dravena Eastmere Fennick Garrowby Hexley Inverdale Jarrold Kestermann
    Lowther Marwick Nethercott Oakhanger Pellworm Quillborne Rossendal Stennick Tarrowfield Umberleigh
    Vantongeren Wexcombe Yarrowgate Zellhof Ashgrove Brackwater Corvale Dunsmore Elmhurst
""")
VENDOR_ENDINGS = _words("Supply Works Industries Trading Partners Systems Brothers Engineering")

TOWNS = _words("""
    Aalborg Bergamo Bilbao Bremen Brno Cork Dijon Faro Gdansk Ghent Graz Groningen Halden Jena Kaunas
    Kotka Leiden Liege Linz Lugano Lund Maribor Oulu Padua Parma Plovdiv Porto Riga Rouen Salamanca
    Split Tartu Trieste Tromso Turku Uppsala Valencia Vigo Wroclaw Zagreb
""")

GREETINGS = ("Hello {name},", "Hi {name},", "Dear {name},", "Good morning {name},", "{name},", "Hey {name}!")
SIGN_OFFS = ("Best,", "Kind regards,", "Thanks,", "Cheers,", "All the best,", "Until soon,", "Regards,")

BEFORE = _lines("""
    I hope your week is going well.
    Sorry for the late reply, the last days were full.
    Quick note before I leave for the day.
    Thanks for bearing with me on this.
    As promised, here is where we are.
    I just came out of the weekly round.
    You asked me to keep you posted.
    Following up on our call.
    I am writing this between two meetings, so excuse the brevity.
    Some news that you will want to have in writing.
    This came up again today.
    I know you have a lot on your plate.
""")
AFTER = _lines("""
    Please tell the others who need to know.
    Let me know if that causes you any trouble.
    I will update the shared folder later.
    No need to answer if this is fine for you.
    Shout if I have missed something.
    I will bring it up in the next round as well.
    We can talk it through over coffee.
    Everything else stays as discussed.
    Please put it in your notes.
    The paperwork follows separately.
    I have told the front desk already.
    Thanks for all the help so far.
""")
ACKNOWLEDGEMENTS = _lines("""
    Thanks, noted.
    Got it, thank you for telling me.
    Understood. I will pass it on.
    Good to know, thanks.
    Fine for me.
    Thanks. Is there anything that I should prepare?
    Okay. I will check what this means for the rest of the plan.
    Clear, thanks. Let us hope it stays that way.
    Noted, and thanks for the quick word.
    Received. I have no objections.
""")

WHO = _lines("""
    my neighbour
    the electrician
    a cousin of mine
    the window cleaner
    our intern
    the night guard
    somebody from accounts
    the gardener
    a lady from the insurance
    the plumber
    the postman
    an old classmate
    the trainee
    the locksmith
    my sister
    the caterer
    a journalist
    the courier
    the carpenter
    our dentist
""")
DID = _words("""
    mended borrowed photographed dropped praised painted hid polished measured misplaced recommended
    sketched tested admired carried covered described cleaned wrapped washed noticed unpacked labelled
    swapped inspected broke glued sharpened rescued weighed
""")
THING = _words("""
    umbrella kettle ladder bicycle trumpet curtain bucket carpet whistle barometer typewriter
    wheelbarrow suitcase doorbell hammock blackboard telescope violin toaster mailbox scaffold lampshade
    notebook lawnmower thermometer bookshelf fountain doormat piano teapot rucksack projector aquarium
    chessboard greenhouse stapler cupboard candlestick hourglass tablecloth armchair sandwich pumpkin
    microphone banner tambourine wallpaper calculator snowman puzzle kite saddle harmonica cactus
    gramophone sundial scarecrow accordion
""")
WHERE = _lines("""
    behind the bus stop
    near the old mill
    under the stairs
    beside the vending machine
    outside the bakery
    on the balcony
    by the river bank
    in the attic
    next to the bicycle racks
    opposite the pharmacy
    at the flea market
    in the basement corridor
    above the garage
    across the square
    between two parked vans
""")
ASIDE = _lines("""
    which made everybody laugh
    and nobody knows why
    so the morning began late
    though it rained heavily
    and the dog barked throughout
    which took longer than lunch
    while the radio played polkas
    and we applauded politely
    so we drank lukewarm tea
    although the instructions were in Finnish
    which proves that patience pays
    and left muddy footprints everywhere
    while pigeons watched curiously
    so half the corridor smelled of varnish
    and then vanished without a trace
    though honestly it hardly mattered
    which reminded me of school holidays
    and apologised afterwards
    so somebody fetched a broom
    while snow was melting on the roof
""")
"""An anecdote is one of each: who did something to a thing somewhere, and a remark."""

SMALL_TALK = (
    (
        "Lunch on {day}?",
        "Does anybody want to try the new place round the corner on {day}? I hear the soup is good.",
    ),
    ("Lost scarf", "Somebody left a green scarf in {room}. It is with me until {day}."),
    (
        "Cake in the kitchen",
        "There is cake in the kitchen, since it is my birthday. First come, first served.",
    ),
    (
        "Printer again",
        "The printer next to {room} is out of toner once more. A new one should come on {day}.",
    ),
    ("Carpool", "Is anybody driving home late on {day}? I could use a lift as far as the station."),
    ("Window left open", "Please close the windows in {room} before you leave; it rained in last night."),
    (
        "Choir rehearsal",
        "Rehearsal on {day} is in {room} this time. New voices are welcome, basses above all.",
    ),
    (
        "Photos from the outing",
        "I have put the photos of the outing on the shared drive. Some of you look very wet.",
    ),
    (
        "Badge reader",
        "The badge reader at the side door is slow. Hold your card a little longer until it is mended.",
    ),
    ("Five-a-side", "We are two players short on {day}. No skill needed, only shoes."),
    ("Plants", "Who waters the plants in {room} while I am away? They need little."),
    ("Newsletter", "The staff newsletter is out. This month: {person} on a life with bees, and a quiz."),
    ("Timesheets", "A friendly reminder that timesheets are due on {day}. Late ones make a lot of work."),
    (
        "Password change",
        "Your password will expire soon. Please change it before {day}; the help desk is in {room}.",
    ),
    (
        "Fire drill",
        "There will be a fire drill on {day}. Please leave by the nearest exit and meet in front of {room}.",
    ),
    (
        "Coffee machine",
        "The coffee machine near {room} will be descaled on {day}, so bring your own that morning.",
    ),
)
STATUS = (
    ("{project}: weekly status", "Short status of {project}: we are about where we wanted to be. {chatter}"),
    ("Notes from the {project} round", "Notes from today: nothing was decided on {project}. {chatter}"),
    ("{project} photos", "I took some pictures for the {project} file. {chatter}"),
    ("Question about {project}", "Who keeps the drawings of {project} at the moment? {chatter}"),
    (
        "{project} and the {item}",
        "A word on the {item} for {project}: the data sheet is in the folder. {chatter}",
    ),
    ("{vendor} brochure", "{vendor} sent a brochure about their {item}. I left it on the table in {room}."),
    ("Visit of {vendor}", "Somebody of {vendor} came by to introduce a colleague. {chatter}"),
    ("Re: {project} risks", "I went through the risks of {project} and would not change anything. {chatter}"),
)
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday")
