//! The conformance suite on every communicator of this crate, for 1..=4 ranks and for more ranks than cores.

use std::{num::NonZeroUsize, time::Duration};

use bonfire_collectives::{
    Communicator, Counting,
    conformance::{self, BREAKING, RESULTS},
    run_ranks,
};

type Program<'a> = &'a (dyn Fn(&dyn Communicator) + Sync);

fn threads(world_size: NonZeroUsize, timeout: Duration, program: Program<'_>) {
    run_ranks(world_size, timeout, |communicator| program(&communicator));
}

fn counting(world_size: NonZeroUsize, timeout: Duration, program: Program<'_>) {
    run_ranks(world_size, timeout, |communicator| program(&Counting::new(communicator)));
}

fn ranks(world_size: usize) -> NonZeroUsize {
    NonZeroUsize::new(world_size).expect("a group has ranks")
}

#[test]
fn threads_give_the_sequential_results() {
    for world_size in 1..=4 {
        conformance::run(RESULTS, ranks(world_size), &threads);
    }
}

#[test]
fn threads_break_on_every_rank() {
    for world_size in 1..=4 {
        conformance::run(BREAKING, ranks(world_size), &threads);
    }
}

#[test]
fn counting_changes_no_result() {
    for world_size in 1..=4 {
        conformance::run(RESULTS, ranks(world_size), &counting);
    }
}

#[test]
fn counting_changes_no_error() {
    for world_size in 1..=4 {
        conformance::run(BREAKING, ranks(world_size), &counting);
    }
}

#[test]
fn more_ranks_than_cores_give_the_same() {
    conformance::run(RESULTS, ranks(8), &threads);
}

#[test]
fn more_ranks_than_cores_break_the_same() {
    conformance::run(BREAKING, ranks(8), &threads);
}
