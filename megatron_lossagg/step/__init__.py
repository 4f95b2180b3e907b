"""One optimizer step: planned, run, checked, reported.

settings           what an aggregator was built with
planner            the one place where a step is built
identity           what must be equal on all ranks
context            what a step knows besides its weights
step               `Step`: data iterators, `loss_func`, `validate`, `report`
schedule_pass      what one run of the schedule did with it
returned_loss      the number of tokens and the graph of what `loss_func` returns
microbatch_report  what it reports of a microbatch
agreement          do context- and tensor-parallel ranks see the same?
group_sums         what the ranks found, summed
checks             before the optimizer steps: did the schedule do what was planned?
report             reports summed over microbatches and ranks, divided once
step_report        the values of a step, and its counts
stream, iterators  steps of a loop that a trainer owns: `wrap`
stream_options     the arguments of `wrap`
finalizer          what happens when the schedule finalizes gradients
deferred_division  gradients of all stages over what the last one counted
host_side          what adapters of frameworks need of an aggregator
"""
