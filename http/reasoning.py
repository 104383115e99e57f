"""How families of models show their reasoning, and which one a model uses.

Reasoning stands at the beginning of an answer. Many templates open it themselves, at the end of the prompt; some models
end it without ever having begun it. Reasoning that is never closed is all the answer there is.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Reasoning:
    name: str
    begin: str
    end: str
    always: bool = False
    """The model reasons from its first token on, whether or not anything says so."""
    special: bool = False
    """The markers are special tokens, which are left out of text unless asked for."""

    def open_in(self, prompt: str) -> bool:
        """Whether an answer to this prompt (as the template renders it) goes on inside the reasoning."""
        ending = prompt.rstrip()
        return ending.endswith(self.begin) or (self.always and not ending.endswith(self.end))


THINK = Reasoning("think", "<think>", "</think>")
DEEPSEEK_R1 = Reasoning("deepseek_r1", "<think>", "</think>", always=True)
MISTRAL = Reasoning("mistral", "[THINK]", "[/THINK]", special=True)
SEED = Reasoning("seed_oss", "<seed:think>", "</seed:think>")
KIMI = Reasoning("kimi", "\u25c1think\u25b7", "\u25c1/think\u25b7")
GRANITE = Reasoning("granite", "Here is my thought process:", "Here is my response:")

FORMATS = {form.name: form for form in (THINK, DEEPSEEK_R1, MISTRAL, SEED, KIMI, GRANITE)}
ALIASES = {
    "qwen3": "think", "glm45": "think", "deepseek_v3": "think", "hunyuan_a13b": "think", "ernie45": "think",
    "step3": "deepseek_r1", "kimi_k2": "think", "holo2": "think", "nemotron_v3": "think",
}  # fmt: skip
"""Names that other engines use for the same."""

_TELLTALES = (("[THINK]", MISTRAL), ("<seed:think>", SEED), (KIMI.begin, KIMI), ("<think>", THINK), ("</think>", THINK))


def detect_reasoning(template: str | None) -> Reasoning | None:
    """By what the chat template prints. None: the model does not reason."""
    for text, form in _TELLTALES:
        if template is not None and text in template:
            return form
    return None


def reasoning_format(name: str) -> Reasoning | None:
    """By the name that --reasoning-parser takes."""
    return FORMATS.get(ALIASES.get(name, name))
