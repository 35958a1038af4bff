"""Every error Sluice raises on purpose.

SluiceError
├── ConfigError        (also ValueError)  a setting is out of bounds, or names something unknown
├── InputError         (also ValueError)  a value handed to a function is out of its domain
├── PolicyError                           a policy of the user's own gave an answer that cannot be applied
├── AdmissionError                        a request was refused: queue full, quota spent, deadline hopeless
├── ReplicaLostError                      an engine replica went away with requests on board
├── ApplicationStartError                 `sluice serve` could not start
├── EngineStartError                      an engine did not come up
├── EngineCallError                       an engine refused a control call
├── PredictorError                        the learned length predictor cannot be reached or has failed
├── StateStoreError                       the shared state (Redis) cannot be read or written
│   └── StateStoreAccessError             and it will not get better by itself: a wrong password, user or certificate
├── ProtocolError                         a peer sent something the wire format does not allow
└── IllegalMoveError                      a request was to take a state that does not follow on its present one
"""


class SluiceError(Exception):
    """Root of the tree: catch this to catch everything Sluice raises on purpose."""


class ConfigError(SluiceError, ValueError):
    """A setting is out of bounds or unknown; raised while building, never while serving."""


class InputError(SluiceError, ValueError):
    """A value handed to a function lies outside the domain its docstring gives."""


class PolicyError(SluiceError):
    """A policy of the user's own answered what no driver can act on; the message names it."""


class AdmissionError(SluiceError):
    """A request was refused before it entered a queue.

    Attributes:
        retry_after_s: after which another try may go better.
    """

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ReplicaLostError(SluiceError):
    """An engine replica stopped answering while it held requests."""


class ApplicationStartError(SluiceError):
    """The application could not start; the message says why and what to do."""


class EngineStartError(SluiceError):
    """An engine did not come up; the message is its own last word."""


class EngineCallError(SluiceError):
    """An engine replica refused a call; the message is its own."""


class PredictorError(SluiceError):
    """The learned length predictor cannot be reached or has failed; callers go on without it."""


class StateStoreError(SluiceError):
    """The state shared by the routers cannot be reached or is not what it should be."""


class StateStoreAccessError(StateStoreError):
    """The shared state answers, and refuses its client; the message names the setting to look at."""


class ProtocolError(SluiceError):
    """A peer sent a message that the wire format does not allow."""


class IllegalMoveError(SluiceError):
    """A request was to take a state to which its present one does not lead: a fault of Sluice's own."""
