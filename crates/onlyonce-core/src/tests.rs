//! Proofs about the core as a whole; each module's own tests stand beside it.

mod boundaries;
mod engine;
mod model;
mod mutants;
