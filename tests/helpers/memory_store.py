"""A store in this process, for tests of those who watch ranks."""


class Memory:
    """As a TCPStore; `broken` answers nothing, like one whose host has died. Keys as they came."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.log: list[str] = []
        self.broken = False

    def add(self, key: str, value: int) -> int:
        """Add to a counter."""
        self.set(key, str(int(self.values.get(key, "0")) + value))
        return int(self.values[key])

    def set(self, key: str, value: str) -> None:
        """Keep a value."""
        if self.broken:
            raise RuntimeError("connection reset by peer")
        self.values[key] = value
        self.log.append(key)

    def get(self, key: str) -> bytes:
        """Read a value."""
        return self.values[key].encode()

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there."""
        return all(key in self.values for key in keys)
