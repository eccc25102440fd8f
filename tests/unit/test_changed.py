"""Waiting for news on an asyncio loop: everybody is told once, and whoever is cancelled ends."""

import asyncio

from roles.rollout.changed import Changed


def test_news_end_the_waits_before_them_and_none_after():
    async def main() -> list[str]:
        changed, seen = Changed(), []

        async def wait(name: str, timeout_s: float) -> None:
            await changed.wait(timeout_s)
            seen.append(name)

        before = [asyncio.create_task(wait(name, 60.0)) for name in ("a", "b")]
        await asyncio.sleep(0)
        changed.tell()
        await asyncio.wait(before, timeout=10.0)
        after = asyncio.create_task(wait("c", 60.0))
        await asyncio.sleep(0.05)
        after.cancel()
        await wait("nobody told it", 0.01)
        return seen

    assert asyncio.run(main()) == ["a", "b", "nobody told it"]


def test_a_cancellation_that_meets_the_news_is_not_lost():
    """A rollout that is told to stop wakes all its credits and cancels them in the same turn of the loop. One that
    missed it would wait on for its version, and the process with it."""

    async def main() -> tuple[int, list[bool]]:
        changed, looks = Changed(), 0

        async def wait_for_a_version() -> None:
            nonlocal looks
            while True:
                looks += 1
                await changed.wait(0.5)

        tasks = [asyncio.create_task(wait_for_a_version()) for _ in range(8)]
        await asyncio.sleep(0.01)
        changed.tell()
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=5.0)
        return looks, [task.cancelled() for task in tasks]

    looks, cancelled = asyncio.run(main())
    assert cancelled == [True] * 8
    assert looks <= 16
