"""A host of its own, as far as its network goes."""

import secrets
import subprocess


class Island:
    """A network of its own, joined to ours by one cable that can be pulled: no packet and no word of it arrives."""

    def __init__(self) -> None:
        self.name = f"sl{secrets.token_hex(4)}"
        self._near, self._far = f"{self.name}a", f"{self.name}b"
        third = secrets.randbelow(250)
        self.ashore, self.address = f"10.213.{third}.1", f"10.213.{third}.2"
        self.command = ("ip", "netns", "exec", self.name)

    def __enter__(self) -> "Island":
        _ip("netns", "add", self.name)
        try:
            _ip("link", "add", self._near, "type", "veth", "peer", "name", self._far, "netns", self.name)
            _ip("address", "add", f"{self.ashore}/30", "dev", self._near)
            _ip("-n", self.name, "address", "add", f"{self.address}/30", "dev", self._far)
            _ip("link", "set", self._near, "up")
            _ip("-n", self.name, "link", "set", self._far, "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def pull(self) -> None:
        _ip("-n", self.name, "link", "set", self._far, "down")

    def join(self) -> None:
        _ip("-n", self.name, "link", "set", self._far, "up")

    def __exit__(self, *_: object) -> None:
        _ip("netns", "delete", self.name)  # the cable goes with it


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}(it takes CAP_NET_ADMIN)"
