import dataclasses

from jpaged.outputs import CompletionOutput, RequestOutput


def test_fields_of_the_contract_in_order():
    assert [field.name for field in dataclasses.fields(RequestOutput)] == [
        "request_id",
        "prompt",
        "prompt_token_ids",
        "outputs",
        "prompt_logprobs",
        "finished",
    ]
    assert [field.name for field in dataclasses.fields(CompletionOutput)] == [
        "index",
        "text",
        "token_ids",
        "finish_reason",
        "stop_reason",
        "cumulative_logprob",
        "logprobs",
    ]


def test_what_was_not_asked_for_is_none():
    completion = CompletionOutput(index=0, text="a", token_ids=[1])
    assert completion.finish_reason is None
    assert completion.stop_reason is None
    assert completion.cumulative_logprob is None
    assert completion.logprobs is None
    output = RequestOutput("7", None, [1, 2], [completion])
    assert output.prompt_logprobs is None
    assert not output.finished
