//! Random shapes, dtypes and groups against the sequential reduction.

use std::{num::NonZeroUsize, time::Duration};

use bonfire_collectives::{DType, ReduceOp, conformance, run_ranks};
use proptest::prelude::*;

const TIMEOUT: Duration = Duration::from_secs(10);

fn dtype() -> impl Strategy<Value = DType> {
    prop::sample::select(DType::ALL.to_vec())
}

fn reduction() -> impl Strategy<Value = (DType, ReduceOp)> {
    (dtype(), prop::sample::select(ReduceOp::ALL.to_vec()))
        .prop_filter("a reduction of this dtype", |&(dtype, op)| op.supports(dtype))
}

/// Mostly short, now and then past the size where ranks share the work.
fn length() -> impl Strategy<Value = usize> {
    prop_oneof![2 => Just(0usize), 6 => 0usize..200, 1 => 0usize..70_000]
}

fn lengths() -> impl Strategy<Value = Vec<usize>> {
    prop::collection::vec(length(), 1..=4)
}

fn ranks(world_size: usize) -> NonZeroUsize {
    NonZeroUsize::new(world_size).expect("a group has ranks")
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn all_reduce_of_any_list_equals_the_sequential_reduction(
        world_size in 1usize..=4,
        seed: u64,
        op in prop::sample::select(ReduceOp::ALL.to_vec()),
        list in prop::collection::vec((dtype(), length()), 0..6),
    ) {
        let list: Vec<_> = list.into_iter().filter(|&(dtype, _)| op.supports(dtype)).collect();
        run_ranks(ranks(world_size), TIMEOUT, |communicator| {
            conformance::all_reduce_case(&communicator, seed, &list, op);
        });
    }

    #[test]
    fn reduce_scatter_of_any_lengths_equals_the_sequential_reduction(
        seed: u64,
        (dtype, op) in reduction(),
        lengths in lengths(),
    ) {
        run_ranks(ranks(lengths.len()), TIMEOUT, |communicator| {
            conformance::reduce_scatter_case(&communicator, seed, dtype, &lengths, op);
        });
    }

    #[test]
    fn all_gather_of_any_lengths_is_in_rank_order(seed: u64, dtype in dtype(), lengths in lengths()) {
        run_ranks(ranks(lengths.len()), TIMEOUT, |communicator| {
            conformance::all_gather_case(&communicator, seed, dtype, &lengths);
        });
    }

    #[test]
    fn a_broadcast_of_any_length_is_exact(
        world_size in 1usize..=4,
        root in 0usize..4,
        seed: u64,
        dtype in dtype(),
        num_elements in length(),
    ) {
        run_ranks(ranks(world_size), TIMEOUT, |communicator| {
            conformance::broadcast_case(&communicator, seed, dtype, num_elements, root % world_size);
        });
    }

    #[test]
    fn a_transfer_of_any_length_is_exact(
        world_size in 2usize..=4,
        from in 0usize..4,
        distance in 1usize..4,
        seed: u64,
        dtype in dtype(),
        num_elements in length(),
    ) {
        let from = from % world_size;
        let to = (from + 1 + (distance - 1) % (world_size - 1)) % world_size;
        run_ranks(ranks(world_size), TIMEOUT, |communicator| {
            conformance::transfer_case(&communicator, seed, dtype, num_elements, (from, to));
        });
    }
}
