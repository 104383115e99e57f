"""`ChoicesStyle`: how chat and completions write an answer, OpenAI's object with a list of `choices`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from slipring.http.frames import EventRenderer, TokenDetails
from slipring.http.generation import Plan
from slipring.http.logprobs import LogprobWriter
from slipring.http.prompts import Prompt
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
        renderer = self.renderer(plan)(
            head,
            usage,
            writer_of(model, plan),
            plan.echo,
            usage_at_end=options is not None and bool(options.include_usage),
            usage_in_every=options is not None and bool(options.continuous_usage_stats),
        )
        if plan.body.return_token_ids or plan.scores >= 0:
            prompts = [plan.prompt_of(index).token_ids for index in range(len(plan.echo))]
            renderer.details = TokenDetails(prompts, bool(plan.body.return_token_ids), plan.logprobs)
        return renderer


def writer_of(model: ServedModel, plan: Plan) -> LogprobWriter:
    by_id = bool(plan.body.return_tokens_as_token_ids)
    return LogprobWriter(model.engine.tokenizer, by_id, plan.skips_special_tokens)


def prompt_details(model: ServedModel, plan: Plan, prompt: Prompt, choice: Choice) -> dict[str, Any]:
    """vLLM's fields about a prompt, those that were asked for."""
    found: dict[str, Any] = {}
    if plan.body.return_token_ids:
        found["prompt_token_ids"] = list(map(int, prompt.token_ids))
    if (num_top := plan.body.prompt_logprobs) is not None and choice.prompt_logprobs is not None:
        found["prompt_logprobs"] = model.logprobs.prompt(prompt.token_ids, choice.prompt_logprobs, num_top)
    return found
