"""`ChoicesStyle`: how chat and completions write an answer, OpenAI's object with a list of `choices`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from slipring.http.frames import EventRenderer
from slipring.http.generation import Plan
from slipring.http.reply import Choice, ReplyHead, Usage
from slipring.http.served import ServedModel


class ChoicesStyle(ABC):
    object_name: str

    @abstractmethod
    def choice(self, model: ServedModel, index: int, choice: Choice, plan: Plan, usage: Usage) -> dict[str, Any]: ...

    @abstractmethod
    def renderer(self, plan: Plan) -> Callable[..., EventRenderer]:
        """What makes the renderer of a streamed answer."""

    def reply(
        self, model: ServedModel, plan: Plan, head: ReplyHead, choices: list[Choice], usage: Usage
    ) -> dict[str, Any]:
        return {
            **head.fields(self.object_name),
            "choices": [self.choice(model, index, choice, plan, usage) for index, choice in enumerate(choices)],
            "usage": usage.fields(),
            "system_fingerprint": head.fingerprint,
        }

    def frames(self, model: ServedModel, plan: Plan, head: ReplyHead, usage: Usage) -> EventRenderer:
        options = plan.body.stream_options
        return self.renderer(plan)(
            head,
            usage,
            model.logprobs,
            plan.echo,
            usage_at_end=options is not None and bool(options.include_usage),
            usage_in_every=options is not None and bool(options.continuous_usage_stats),
        )
