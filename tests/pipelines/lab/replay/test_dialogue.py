"""A dialogue's suffix tree goes on from turn to turn, and drafts what one built at once would."""

from __future__ import annotations

from dataclasses import replace

from decoder.drafting.suffix import SuffixCache
from decoder.settings import WorkerSettings
from pipelines.lab.replay.dialogue import DialogueCache, turns
from tests.pipelines.lab.replay.samples import copying_traces, dialogue

SETTINGS = WorkerSettings()


def test_a_dialogue_goes_on_in_one_tree_and_drafts_the_same() -> None:
    traces = [*dialogue(1, 5), *copying_traces(2)]
    kept, plain = DialogueCache(SETTINGS), SuffixCache(SETTINGS)
    drafts = 0
    for turn in turns(traces, kept):
        plain.start(turn.name, turn.prompt, "")
        plain.index(None)
        for done in range(1, len(turn.output)):
            for cache in (kept, plain):
                cache.extend(turn.name, turn.output[done - 1 : done])
            context = turn.text[: len(turn.prompt) + done]
            draft = kept.propose(turn.name, context, 64)
            assert draft == plain.propose(turn.name, context, 64)
            drafts += draft is not None
        for cache in (kept, plain):
            cache.extend(turn.name, turn.output[-1:])
        plain.stop(turn.name)
    assert drafts > 100
    assert kept.trees.continued == 4


def test_a_prompt_that_does_not_go_on_from_the_last_turn_is_indexed_anew() -> None:
    first, second = dialogue(3, 2)
    changed = replace(second, prompt=[0, *second.prompt[1:]])
    cache = DialogueCache(SETTINGS)
    for turn in turns([first, changed], cache):
        cache.extend(turn.name, turn.output)
    assert cache.trees.continued == 0
