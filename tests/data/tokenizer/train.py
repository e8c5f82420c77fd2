"""Makes tokenizer.json beside this file: a small byte-level BPE, trained on kvbench/workload/words.txt and the text below.

python tests/data/tokenizer/train.py
"""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

TEXT = """A load test is a question put to a machine. How much can you carry, and what gives way first when you cannot?
The answer is only as good as the question: a prompt that was sent before is not the same work as one that is new.
So each run begins its prompts with something of its own, and what is meant to be shared is shared on purpose.
Lengths are asked for in tokens, counted by the one who is asked, and both numbers stand in the report.
"""


def main() -> None:
    here = Path(__file__).parent
    words = (here.parents[2] / "kvbench/workload/words.txt").read_text().split()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=1800, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    corpus = [TEXT, *(f"{a} {b} {a}" for a, b in zip(words[::2], words[1::2], strict=True)), *words[::2]]
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.save(str(here / "tokenizer.json"), pretty=False)


if __name__ == "__main__":
    main()
