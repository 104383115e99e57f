"""POST /tokenize (a text, or a conversation as chat would render it) and POST /detokenize."""

from __future__ import annotations

from slipring.http import conversation
from slipring.http.bodies import DetokenizeBody, TokenizeBody, decode
from slipring.http.errors import bad_request
from slipring.http.exchange import ApiRequest, ApiResponse
from slipring.http.served import ServedModel
from slipring.http.tools import check_definitions


async def tokenize(model: ServedModel, request: ApiRequest) -> ApiResponse:
    data = await request.read()
    body = decode(data, TokenizeBody)
    model.check_name(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("Give exactly one of `prompt` and `messages`.", "prompt")
    if body.prompt is not None:
        model.check_length(body.prompt, "prompt")
        token_ids = await model.engine.encode(body.prompt, body.add_special_tokens is not False)
    else:
        check_definitions(body.tools or [])
        parts = await model.engine.text_work(len(data), conversation.render, model.engine, body, body.tools)
        token_ids = await model.encode_parts(parts, bool(body.add_special_tokens))
    names = [model.logprobs.text(token_id) for token_id in token_ids] if body.return_token_strs else None
    return ApiResponse.json(
        {
            "count": len(token_ids),
            "max_model_len": model.engine.max_model_len,
            "tokens": token_ids,
            "token_strs": names,
        }
    )


async def detokenize(model: ServedModel, request: ApiRequest) -> ApiResponse:
    body = decode(await request.read(), DetokenizeBody)
    model.check_name(body.model)
    model.room(max(1, len(body.tokens)), "tokens", least=0)
    model.rules.check_ids(body.tokens, "tokens")
    return ApiResponse.json({"prompt": model.engine.tokenizer.decode(body.tokens, skip_special_tokens=False)})
