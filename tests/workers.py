"""Which tests `pytest -n 2` gives to which process."""

from xdist.scheduler import LoadScopeScheduling

# Each starts a Ray, and Rays that start at once take each other's ports.
APPLICATIONS = (
    "tests/integration/one_model/",
    "tests/integration/several_models/",
    "tests/integration/test_prefill_decode.py",
    "tests/integration/test_serve_deploy.py",
    "tests/k8s/test_semantic.py",
)


class Schedule(LoadScopeScheduling):
    """Whole applications one after the other in one process, from the start on; every other test where there is room.

    Not `--dist loadgroup`: xdist 3.8 marks groups in a field of tests that pytest 9.2 no longer reads.
    """

    def _split_scope(self, nodeid: str) -> str:
        """Tests of a scope go together, and the scope of the most tests goes first."""
        return "applications" if nodeid.startswith(APPLICATIONS) else nodeid
