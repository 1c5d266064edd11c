"""Low-rank adapters of linears, stacked experts and routers: add, load and save them through PEFT."""
