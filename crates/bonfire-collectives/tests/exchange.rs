//! Collectives over messages: the conformance suite, and the same bits as between threads.

mod support;

use std::{num::NonZeroUsize, thread, time::Duration};

use bonfire_collectives::{
    Buffer, BufferMut, CollectiveError, Communicator, DType, ExchangeCommunicator, ReduceOp, Transport,
    conformance::{self, BREAKING, RESULTS, oracle},
    run_ranks,
};
use proptest::prelude::*;
use support::{ChannelTransport, LateNotices};

type Program<'a> = &'a (dyn Fn(&dyn Communicator) + Sync);

const TIMEOUT: Duration = Duration::from_secs(10);

fn ranks(world_size: usize) -> NonZeroUsize {
    NonZeroUsize::new(world_size).expect("a group has ranks")
}

fn group(world_size: usize, timeout: Duration) -> Vec<ExchangeCommunicator<ChannelTransport>> {
    over(ChannelTransport::mesh(world_size), timeout)
}

fn over<T: Transport>(transports: Vec<T>, timeout: Duration) -> Vec<ExchangeCommunicator<T>> {
    transports.into_iter().map(|one| ExchangeCommunicator::new(one, timeout)).collect()
}

fn exchanging(world_size: NonZeroUsize, timeout: Duration, program: Program<'_>) {
    thread::scope(|scope| {
        for communicator in group(world_size.get(), timeout) {
            scope.spawn(move || program(&communicator));
        }
    });
}

#[test]
fn messages_give_the_sequential_results() {
    for world_size in 1..=4 {
        conformance::run(RESULTS, ranks(world_size), &exchanging);
    }
}

#[test]
fn messages_break_on_every_rank() {
    for world_size in 1..=4 {
        conformance::run(BREAKING, ranks(world_size), &exchanging);
    }
}

#[test]
fn a_rank_that_ends_fails_the_first_call_that_needs_it() {
    let mut group = group(3, TIMEOUT).into_iter();
    let (zero, one, two) = (group.next().unwrap(), group.next().unwrap(), group.next().unwrap());
    drop(two);
    thread::scope(|scope| {
        // The other two do not need it yet.
        scope.spawn(|| one.recv(BufferMut::from_slice(&mut [0u8]), 0).unwrap());
        zero.send(Buffer::from_slice(&[1u8]), 1).unwrap();
    });
    for rank in [zero, one] {
        let Err(CollectiveError::Broken { cause, .. }) = rank.barrier() else { panic!("rank 2 has ended") };
        assert_eq!(*cause, CollectiveError::RankEnded { rank: 2, world_size: 3, num_calls: 0, panicked: false });
    }
}

#[test]
fn a_rank_that_panics_breaks_the_group_at_once() {
    let mut group = group(2, TIMEOUT).into_iter();
    let (zero, one) = (group.next().unwrap(), group.next().unwrap());
    let victim = thread::spawn(move || zero.recv(BufferMut::from_slice(&mut [0u8]), 1));
    let culprit = thread::spawn(move || {
        let _communicator = one;
        std::panic::resume_unwind(Box::new("a bug"));
    });
    assert!(culprit.join().is_err());
    let Err(CollectiveError::Broken { cause, .. }) = victim.join().unwrap() else { panic!("rank 1 has panicked") };
    assert!(matches!(*cause, CollectiveError::RankEnded { rank: 1, panicked: true, .. }), "{cause}");
}

#[test]
fn an_argument_that_is_wrong_on_one_rank_breaks_the_group_for_all() {
    let mut group = group(2, TIMEOUT).into_iter();
    let (zero, one) = (group.next().unwrap(), group.next().unwrap());
    let waiting = thread::spawn(move || zero.barrier());
    let wrong = one.broadcast(BufferMut::from_slice(&mut [0u8]), 7).unwrap_err();
    assert!(matches!(wrong, CollectiveError::WrongRank { argument: "root", value: 7, .. }));
    let Err(CollectiveError::Broken { cause, .. }) = waiting.join().unwrap() else { panic!("rank 1 was wrong") };
    assert_eq!(*cause, wrong);
}

#[test]
fn a_rank_that_waited_once_is_not_taken_for_one_that_waits() {
    let mut group = over(LateNotices::mesh(2), TIMEOUT).into_iter();
    let (zero, one) = (group.next().unwrap(), group.next().unwrap());
    // Long enough that a rank asks why it waits.
    let long = Duration::from_millis(100);
    thread::scope(|scope| {
        scope.spawn(|| {
            zero.recv(BufferMut::from_slice(&mut [0u8]), 1).unwrap();
            thread::sleep(long);
            zero.send(Buffer::from_slice(&[1u8]), 1).unwrap();
        });
        thread::sleep(long);
        one.send(Buffer::from_slice(&[1u8]), 0).unwrap();
        // Now it learns that rank 0 has waited.
        one.recv(BufferMut::from_slice(&mut [0u8]), 0).unwrap();
    });
}

/// The bytes of one all_reduce, by rank and buffer.
fn reduced(communicator: &dyn Communicator, seed: u64, list: &[(DType, usize)], op: ReduceOp) -> Vec<Vec<u8>> {
    let given = |(index, &(dtype, length)): (usize, &(DType, usize))| {
        oracle::values(seed.wrapping_add(index as u64), communicator.rank(), dtype, length)
    };
    let mut bytes: Vec<Vec<u8>> = list.iter().enumerate().map(given).collect();
    let view = |(bytes, &(dtype, _)): (_, &(DType, usize))| BufferMut::new(dtype, bytes).unwrap();
    let mut views: Vec<_> = bytes.iter_mut().map(Vec::as_mut_slice).zip(list).map(view).collect();
    communicator.all_reduce_many(&mut views, op).unwrap();
    bytes
}

fn length() -> impl Strategy<Value = usize> {
    prop_oneof![2 => Just(0usize), 6 => 0usize..200, 2 => 0usize..200_000]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn messages_give_the_bits_that_threads_give(
        world_size in 1usize..=4,
        seed: u64,
        op in prop::sample::select(ReduceOp::ALL.to_vec()),
        list in prop::collection::vec((prop::sample::select(DType::ALL.to_vec()), length()), 0..6),
    ) {
        let list: Vec<_> = list.into_iter().filter(|&(dtype, _)| op.supports(dtype)).collect();
        let threads = run_ranks(ranks(world_size), TIMEOUT, |communicator| reduced(&communicator, seed, &list, op));
        let messages: Vec<_> = thread::scope(|scope| {
            let list = &list;
            let run = |communicator| scope.spawn(move || reduced(&communicator, seed, list, op));
            let threads: Vec<_> = group(world_size, TIMEOUT).into_iter().map(run).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        prop_assert!(messages == threads);
    }

    #[test]
    fn any_lengths_are_scattered_and_gathered(
        seed: u64,
        dtype in prop::sample::select(DType::ALL.to_vec()),
        op in prop::sample::select(ReduceOp::ALL.to_vec()),
        lengths in prop::collection::vec(length(), 1..=4),
    ) {
        exchanging(ranks(lengths.len()), TIMEOUT, &|communicator| {
            conformance::all_gather_case(communicator, seed, dtype, &lengths);
            conformance::broadcast_case(communicator, seed, dtype, lengths[0], lengths.len() - 1);
            if lengths.len() > 1 {
                conformance::transfer_case(communicator, seed, dtype, lengths[0], (0, 1));
            }
            if op.supports(dtype) {
                conformance::reduce_scatter_case(communicator, seed, dtype, &lengths, op);
            }
        });
    }
}
