"""What the tasks of one asyncio loop wait for together, again and again."""

import asyncio
import contextlib


class Changed:
    """Each call of ``tell`` ends all waits that began before it, and none that begin after it: a task that looks again
    and finds nothing for itself waits anew, instead of spinning."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def tell(self) -> None:
        """On the loop's thread."""
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self, timeout_s: float) -> None:
        """Return when told, at the latest after ``timeout_s``. A cancellation always comes through, also when it meets
        the news in one turn of the loop (``asyncio.wait_for`` of Python 3.11 would swallow it)."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._event.wait()
