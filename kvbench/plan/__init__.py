"""Before a run: gains of a law from a step test, policies from episodes in virtual time. Plays parts of a run, keeps nothing."""
