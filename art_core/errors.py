"""Errors: every one names the thing, what was expected, what was found, and the way out."""


class ArtError(Exception):
    """Base of every error that this project raises on purpose."""


class ConfigError(ArtError, ValueError):
    """A setting is missing, unknown or out of range."""


class RewardError(ArtError, ValueError):
    """A reward is missing, not a number, or given to a rollout that failed."""


class UnknownTrajectoryError(ArtError, KeyError):
    """No trajectory has this id, or it has already ended."""

    def __str__(self) -> str:
        # KeyError would show the message as a quoted repr.
        return str(self.args[0]) if self.args else ""


class NothingToTrainError(ArtError, ValueError):
    """Training was asked for, and nothing collected can be trained on."""


class NoPolicyCallsError(ArtError, RuntimeError):
    """A rollout ended without one captured call of the policy."""


class RolloutFailedError(ArtError, RuntimeError):
    """A rollout failed, and the failure policy says that nothing goes on after that."""


class AgentInterruptedError(ArtError, RuntimeError):
    """An agent waits for a person, and nobody is there to answer."""


class RolloutTooLongError(ArtError, RuntimeError):
    """A rollout made more policy calls than its model's ``rollout_length`` allows."""


class CaptureError(ArtError, RuntimeError):
    """A completion cannot be turned into an exact step."""


class StoreError(ArtError, RuntimeError):
    """The durable record cannot be opened, read or written."""


class SinkError(ArtError, RuntimeError):
    """A place where metrics go cannot be reached."""


class UnknownProjectError(StoreError):
    """No project of this name, or not exactly one project, has a record here."""


class UnknownRunError(ArtError, KeyError):
    """No run has this id."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class EngineError(ArtError, RuntimeError):
    """An inference engine did not start, died, or refused a request of ours."""


class UnsupportedParameterError(ArtError, ValueError):
    """A request names a parameter, or a value of one, that the engine cannot honour."""


class ChatTemplateError(ArtError, ValueError):
    """The model's chat template refuses these messages."""


class OutOfMemoryError(ArtError, RuntimeError):
    """Training ran out of memory, and smaller pieces would not help."""


class TrainerProcessError(ArtError, RuntimeError):
    """A process that trains did not start, died, or failed by itself; all of them have been ended."""


class TrainingStoppedError(ArtError, RuntimeError):
    """A guardrail ended the training; nothing more is trained until somebody says so."""


class CheckpointError(ArtError, RuntimeError):
    """A checkpoint is missing, incomplete, damaged, or belongs to another model."""


def words_of(error: BaseException) -> str:
    """What an exception says; of a group (as task groups raise), what each of its exceptions says."""
    if not isinstance(error, BaseExceptionGroup):
        # A KeyError says its key and nothing else.
        return repr(error) if isinstance(error, KeyError) else str(error) or repr(error)
    parts: tuple[BaseException, ...] = error.exceptions  # pyright: ignore[reportUnknownMemberType]
    said = "; ".join(f"{type(part).__name__}: {words_of(part)}" for part in parts)
    return f"{error.message}: {said}"
