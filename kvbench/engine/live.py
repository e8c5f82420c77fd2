"""The jobs under way: the answers that an engine still works on, and what those that ended came to."""

from collections.abc import Iterator
from dataclasses import dataclass

from kvbench.engine import Done, Job
from kvbench.engine.sequence import Entry, Sequence


@dataclass(slots=True)
class _Entry:
    """One job: its choices that have not ended; tokens and preemptions of those that have."""

    job: Job
    choices: list[Sequence]
    tokens: int = 0
    preempted: int = 0


class Live:
    """Iterates over ids. Every call with an id that is not live raises KeyError. `entered`: first admissions by job id; what it
    says of a job is taken out as the job ends."""

    def __init__(self, entered: dict[int, Entry]) -> None:
        self._jobs: dict[int, _Entry] = {}
        self._entered = entered

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[int]:
        return iter(self._jobs)

    def __contains__(self, job_id: object) -> bool:
        return job_id in self._jobs

    def add(self, job: Job, choices: list[Sequence]) -> None:
        """`choices`: those with tokens to come; the others have had all of theirs elsewhere."""
        self._jobs[job.id] = _Entry(job, choices, (job.n - len(choices)) * job.max_tokens)

    def sequences(self, job_id: int) -> list[Sequence]:
        """Its choices that have not ended."""
        return self._jobs[job_id].choices

    def ended(self, sequence: Sequence) -> Done | None:
        """A choice has its last token. Returns the job's end when it was the last of them."""
        entry = self._jobs[sequence.job.id]
        entry.tokens += sequence.generated
        entry.preempted += sequence.preempted
        entry.choices.remove(sequence)
        return None if entry.choices else self.remove(sequence.job.id)

    def remove(self, job_id: int, failed: str = "") -> Done:
        """Forget the job. Returns how far it came."""
        done = self.progress(job_id, failed)
        del self._jobs[job_id]
        self._entered.pop(job_id, None)
        return done

    def progress(self, job_id: int, failed: str = "") -> Done:
        """The job so far."""
        entry = self._jobs[job_id]
        tokens = entry.tokens + sum(s.generated for s in entry.choices)
        preempted = entry.preempted + sum(s.preempted for s in entry.choices)
        cached, below, begun = self._entered.get(job_id, (0, 0, None))
        return Done(job_id, entry.job.tokens, tokens, cached, preempted, failed, below, begun)

    def begun(self, job_id: int) -> tuple[int, ...]:
        """Answer tokens of each choice so far, those from other nodes included."""
        job = self._jobs[job_id].job
        live = {sequence.name[1]: sequence.generated for sequence in self._jobs[job_id].choices}
        return tuple(live.get(choice, job.max_tokens) for choice in range(job.n))

    def check(self, queued: list[Sequence]) -> None:
        """Assert that the batch's sequences are the jobs'. Slow: for tests."""
        live = [s for entry in self._jobs.values() for s in entry.choices]
        assert len(queued) == len(live), "sequences lost or doubled"
        assert set(map(id, queued)) == set(map(id, live)), "queues and jobs disagree"
        assert set(self._entered) <= set(self._jobs), "admissions of jobs that ended"
        assert all(s.prompt <= s.known < s.end for s in live), "a finished sequence is live"
