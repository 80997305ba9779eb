"""In: a step and its arguments. Out: `Captured`, a program tied to live objects. No strategy, no collective of ours."""
