"""Continuous batching over the slots of an engine."""

import random

import pytest
from toy_engine import ToyEngine, digest_answer

from graphtrain.data.tokenizers.byte import ByteTokenizer
from graphtrain.errors import TrainingError
from graphtrain.run.serving.engine_protocol import SamplingParameters
from graphtrain.run.serving.fair_queue import FairQueue
from graphtrain.run.serving.scheduler import Job, Scheduler
from graphtrain.run.serving.sequence import ScoreRequest, SequenceRequest

DECODE = ByteTokenizer().decode


def request(prompt, max_tokens=8, adapter=None, **sampling):
    sampling = SamplingParameters(max_tokens=max_tokens, **sampling)
    return SequenceRequest(prompt=tuple(prompt), sampling=sampling, adapter=adapter)


def job(*requests):
    return Job(requests, lambda updates: None)


def run(scheduler, *jobs):
    """Submit requests, step until all is done, and return the tokens of each sequence."""
    for one in jobs:
        scheduler.submit(one)
    return finish(scheduler, *jobs)


def finish(scheduler, *jobs):
    tokens = {(one, index): [] for one in jobs for index in range(len(one.requests))}
    while not scheduler.is_idle:
        for one, updates in scheduler.step().items():
            for update in updates:
                assert update.error is None
                tokens[one, update.index] += [token.choice.token for token in update.tokens]
    return list(tokens.values())


def test_a_sequence_in_a_batch_is_the_sequence_alone():
    source = random.Random(0)
    requests = [
        request(source.randbytes(source.randint(1, 90)), source.randint(1, 40), seed=index)
        for index in range(60)
    ]
    together = run(Scheduler(ToyEngine(), DECODE), *map(job, requests))
    alone = [run(Scheduler(ToyEngine(), DECODE), job(one))[0] for one in requests]
    assert together == alone
    assert [len(tokens) for tokens in alone] == [one.sampling.max_tokens for one in requests]


def test_a_long_prompt_does_not_stall_sequences_that_are_generated():
    engine = ToyEngine(chunk=16, context_length=2000)
    scheduler = Scheduler(engine, DECODE)
    scheduler.submit(job(request(b"a", 400)))
    scheduler.step()
    scheduler.submit(job(request(b"b" * 1600, 1)))
    engine.calls.clear()
    for _ in range(100):
        scheduler.step()
    names = [name for name, _ in engine.calls]
    assert names[:200] == ["prefill", "decode"] * 100


def test_short_prompts_do_not_wait_for_a_long_one():
    scheduler = Scheduler(ToyEngine(chunk=16, context_length=2000), DECODE)
    long, short = job(request(b"b" * 1600, 1)), job(request(b"short", 1))
    scheduler.submit(long)
    scheduler.submit(short)
    done = []
    while len(done) < 2:
        done += scheduler.step()
    assert done == [short, long]


def test_several_short_prompts_share_a_chunk():
    engine = ToyEngine(chunk=16)
    scheduler = Scheduler(engine, DECODE)
    for letter in b"abcd":
        scheduler.submit(job(request([letter] * 4, 9)))
    scheduler.step()
    assert [name for name, _ in engine.calls] == ["prefill"] * 4 + ["decode"]


def test_many_short_prompts_do_not_stall_what_is_generated():
    engine = ToyEngine(chunk=64, slots=40)
    scheduler = Scheduler(engine, DECODE)
    for letter in range(40):
        scheduler.submit(job(request([letter], 9)))
    scheduler.step()
    assert [name for name, _ in engine.calls] == ["prefill"] * 16 + ["decode"]


def test_a_conversation_that_goes_on_is_not_computed_again():
    engine = ToyEngine(chunk=64)
    scheduler = Scheduler(engine, DECODE)
    first = request(b"a" * 50, 10)
    (answer,) = run(scheduler, job(first))
    engine.calls.clear()
    run(scheduler, job(request([*first.prompt, *answer, *b"more"], 2)))
    # All but the last generated token have keys and values, and the new text does not.
    assert engine.calls[0] == ("prefill", 5)
    assert scheduler.statistics.cached_tokens == 59


def test_adapters_share_a_batch_and_no_prefix():
    names = ["first", "second"]
    source = random.Random(0)
    requests = [
        request(
            b"a common system prompt " * 2 + source.randbytes(source.randint(1, 9)),
            source.randint(1, 20),
            adapter=source.choice([None, *names]),
            seed=index,
        )
        for index in range(60)
    ]
    scheduler = Scheduler(ToyEngine(adapters=names), DECODE)
    together = run(scheduler, *map(job, requests))
    alone = [run(Scheduler(ToyEngine(adapters=names), DECODE), job(one))[0] for one in requests]
    assert together == alone
    assert scheduler.statistics.cached_tokens > 0


def test_a_prompt_of_another_adapter_is_computed_again():
    engine = ToyEngine(chunk=64, adapters=["first"])
    scheduler = Scheduler(engine, DECODE)
    prompt = b"p" * 40
    run(scheduler, job(request(prompt, 1)))
    engine.calls.clear()
    run(scheduler, job(request(prompt, 1, adapter="first")))
    assert engine.calls == [("prefill", 40)]
    run(scheduler, job(request(prompt, 1)), job(request(prompt, 1, adapter="first")))
    assert engine.calls[1:] == [("prefill", 1), ("prefill", 1)]


def test_a_prefix_that_another_slot_holds_is_copied():
    engine = ToyEngine(chunk=64)
    scheduler = Scheduler(engine, DECODE)
    system = b"s" * 40
    run(scheduler, job(request(system + b"first question, and a long one" * 3, 9)))
    engine.calls.clear()
    run(scheduler, job(request(system + b"other", 1)))
    assert engine.calls[:2] == [("copy", 40), ("prefill", 5)]
    run(scheduler, job(request(system + b"first question, and a long one" * 3, 1)))
    assert engine.calls[-1] == ("prefill", 1)  # what the source held stayed


@pytest.mark.parametrize(
    ("rest", "is_reused"), [(b"one", True), (b"!" * 60, False)], ids=["near", "far"]
)
def test_a_prefix_that_a_rolling_buffer_has_overwritten_is_computed_again(rest, is_reused):
    engine = ToyEngine(chunk=16, window=8)
    scheduler = Scheduler(engine, DECODE)
    run(scheduler, job(request(b"s" * 40 + rest, 3)))
    engine.calls.clear()
    again = job(request(b"s" * 40 + b"three", 5))
    tokens = run(scheduler, again)
    prefills = [count for name, count in engine.calls if name == "prefill"]
    assert prefills == ([5] if is_reused else [16, 16, 13])
    assert scheduler.statistics.cached_tokens == (40 if is_reused else 0)
    assert tokens == run(Scheduler(ToyEngine(chunk=16, window=8), DECODE), again)


def test_samples_of_one_prompt_compute_it_once():
    engine = ToyEngine(chunk=16, slots=8)
    scheduler = Scheduler(engine, DECODE)
    samples = [request(b"p" * 100, 5, seed=seed) for seed in range(8)]
    tokens = run(scheduler, job(*samples))
    assert tokens == [run(Scheduler(ToyEngine(), DECODE), job(one))[0] for one in samples]
    computed = sum(count for name, count in engine.calls if name == "prefill")
    assert computed < 100 + 8 * 16


def test_requests_take_turns_however_many_sequences_they_have():
    scheduler = Scheduler(ToyEngine(slots=1), DECODE)
    big, small = job(*[request([index], 1) for index in range(5)]), job(request(b"x", 1))
    scheduler.submit(big)
    scheduler.submit(small)
    order = []
    while not scheduler.is_idle:
        order += scheduler.step()
    assert order.index(small) == 1


def test_the_queue_is_first_in_first_out_for_equal_requests():
    queue = FairQueue()
    for owner, item in [("a", 1), ("a", 2), ("b", 3), ("c", 4)]:
        queue.push(owner, item)
    queue.remove("c")
    assert len(queue) == 3 and [queue.pop() for _ in range(3)] == [1, 3, 2]


def test_cancelled_requests_free_their_slots_in_every_state():
    engine = ToyEngine(slots=2, chunk=16)
    scheduler = Scheduler(engine, DECODE)
    active, prefilling, waiting = (job(request(text, 200)) for text in (b"a", b"b" * 99, b"c"))
    scheduler.submit(active)
    scheduler.step()
    scheduler.submit(prefilling)
    scheduler.submit(waiting)
    scheduler.step()
    statistics = scheduler.statistics
    states = statistics.active, statistics.prefilling, statistics.waiting
    assert states == (1, 1, 1)
    for one in (active, prefilling, waiting):
        scheduler.cancel(one)
    assert scheduler.is_idle and statistics.cancelled == 3
    assert not any(map(engine.is_active, range(2)))
    alone = run(Scheduler(ToyEngine(), DECODE), job(request(b"a", 20)))
    assert run(scheduler, job(request(b"a", 20))) == alone


def test_an_error_of_one_prompt_fails_that_sequence_only():
    engine = ToyEngine()
    scheduler = Scheduler(engine, DECODE)
    good, bad = job(request(b"good", 30)), job(request(b"bad"))
    scheduler.submit(good)
    scheduler.step()
    scheduler.submit(bad)
    engine.failure = TrainingError("the logits are not finite")
    (failed,) = scheduler.step()[bad]
    assert failed.is_last and isinstance(failed.error, TrainingError)
    finish(scheduler, good)
    assert (scheduler.statistics.finished, scheduler.statistics.failed) == (1, 1)


def test_a_sequence_ends_with_the_context():
    engine = ToyEngine(context_length=32)
    scheduler = Scheduler(engine, DECODE)
    (tokens,) = run(scheduler, job(request(b"p" * 30, 100)))
    assert len(tokens) == 2


def test_a_text_is_scored_while_others_are_generated():
    scheduler = Scheduler(ToyEngine(), DECODE)
    scores = Job((ScoreRequest(prompt=tuple(b"text")),), lambda updates: None)
    scheduler.submit(job(request(b"a", 30)))
    scheduler.submit(scores)
    (update,) = scheduler.step()[scores]
    assert [score and score.token for score in update.scores] == [None, *b"ext"]
    assert update.usage is not None and update.usage.prompt_tokens == 4


@pytest.mark.parametrize("stop", ["zz", "\n"])
def test_a_stop_string_frees_the_slot(stop):
    engine = ToyEngine(answer=lambda tokens, seed: ord("z"))
    scheduler = Scheduler(engine, DECODE)
    one = SequenceRequest(prompt=(1,), sampling=SamplingParameters(max_tokens=20), stop=(stop,))
    updates = []
    scheduler.submit(job(one))
    while not scheduler.is_idle:
        updates += [update for some in scheduler.step().values() for update in some]
    text = "".join(update.text for update in updates)
    expected = ("", "stop") if stop == "zz" else ("z" * 20, "length")
    assert (text, updates[-1].finish_reason) == expected
    assert not engine.is_active(0)


@pytest.mark.parametrize("seed", range(20))
def test_whatever_comes_and_goes_every_answer_is_that_of_its_prompt(seed):
    source = random.Random(seed)
    window = source.randint(1, 20) if seed % 2 else None
    sizes = {"slots": source.randint(1, 5), "chunk": source.randint(1, 40)}
    engine = ToyEngine(**sizes, window=window)
    scheduler = Scheduler(engine, DECODE)
    beginnings = [source.randbytes(source.randint(1, 60)) for _ in range(3)]
    jobs, tokens = [], {}
    for _ in range(200):
        chance = source.random()
        if chance < 0.3:
            prompt = source.choice(beginnings) + source.randbytes(source.randint(0, 30))
            samples = [request(prompt, source.randint(1, 30), seed=one) for one in range(2)]
            jobs.append(job(*samples[: source.randint(1, 2)]))
            scheduler.submit(jobs[-1])
        elif chance < 0.35 and jobs:
            scheduler.cancel(jobs.pop(source.randrange(len(jobs))))
        if not scheduler.is_idle:
            collect(scheduler.step(), tokens)
    while not scheduler.is_idle:
        collect(scheduler.step(), tokens)
    for one in jobs:
        for index, sequence in enumerate(one.requests):
            cache, expected = list(sequence.prompt), []
            for _ in range(sequence.sampling.max_tokens):
                seen = [*cache, *expected][-window if window else 0 :]
                expected.append(digest_answer(256)(seen, sequence.sampling.seed))
            assert tokens[one, index] == expected


def collect(progress, tokens):
    for one, updates in progress.items():
        for update in updates:
            kept = tokens.setdefault((one, update.index), [])
            kept += [token.choice.token for token in update.tokens]
