"""The words of the test corpus."""

SENTENCE = "the model reads a line of text and learns which token comes next in every step of its training run"
WORDS = SENTENCE.split()
