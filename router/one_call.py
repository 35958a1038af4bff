"""Questions that come in one turn of the event loop, asked in one call."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

QuestionT = TypeVar("QuestionT")
ReplyT = TypeVar("ReplyT")


class _Asked(NamedTuple, Generic[QuestionT, ReplyT]):
    question: QuestionT
    reply: "asyncio.Future[ReplyT]"


class OneCall(Generic[QuestionT, ReplyT]):
    """A wave of requests costs a few calls in the place of one each."""

    def __init__(self, call: Callable[[Sequence[QuestionT]], Awaitable[Sequence[ReplyT]]], most: int) -> None:
        """Args:
        call: brings a reply to each question, in their order; its error is that of all.
        most: questions of one call.
        """
        self._call, self._most = call, most
        self._waiting: list[_Asked[QuestionT, ReplyT]] = []
        self._calls: set[asyncio.Task[None]] = set()

    async def ask(self, question: QuestionT) -> ReplyT:
        """Raises what the call raises. A question whose asker has left before the call is not asked."""
        loop = asyncio.get_running_loop()
        asked = _Asked[QuestionT, ReplyT](question, loop.create_future())
        if not self._waiting:
            loop.call_soon(self._send)
        self._waiting.append(asked)
        return await asked.reply

    async def answered(self) -> None:
        """Return when every call that is on its way has ended: what is told after that, is told after those."""
        if self._calls:
            await asyncio.wait(self._calls)

    def _send(self) -> None:
        waiting, self._waiting = [each for each in self._waiting if not each.reply.done()], []
        for start in range(0, len(waiting), self._most):
            call = asyncio.ensure_future(self._answer(waiting[start : start + self._most]))
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)

    async def _answer(self, asked: Sequence[_Asked[QuestionT, ReplyT]]) -> None:
        try:
            replies = await self._call([each.question for each in asked])
        except Exception as error:  # of any kind: it is the askers'
            for each in asked:
                if not each.reply.done():
                    each.reply.set_exception(error)
        else:
            for each, reply in zip(asked, replies, strict=True):
                if not each.reply.done():
                    each.reply.set_result(reply)
        finally:
            for each in asked:  # those that the loop's end left without one
                each.reply.cancel()
