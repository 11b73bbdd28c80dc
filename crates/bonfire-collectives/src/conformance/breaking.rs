//! Checks of how a group breaks: on every rank, in time, and for good.

use std::{
    thread,
    time::{Duration, Instant},
};

use super::{Call, Check, Program};
use crate::{Buffer, BufferMut, Collective, CollectiveError, Communicator, DType, ReduceOp};

/// Checks that each break the group they run on.
pub const BREAKING: &[Check] = &[
    mismatch(
        "another collective",
        |c, odd| {
            if odd { c.barrier() } else { c.broadcast(BufferMut::from_slice(&mut [0u8]), 0) }
        },
    ),
    mismatch("another reduction", |c, odd| {
        let op = if odd { ReduceOp::Max } else { ReduceOp::Sum };
        c.all_reduce(BufferMut::from_slice(&mut [0u8]), op)
    }),
    mismatch("another dtype of the same size", |c, odd| {
        let dtype = if odd { DType::I32 } else { DType::F32 };
        c.all_reduce(BufferMut::new(dtype, &mut [0; 8])?, ReduceOp::Sum)
    }),
    mismatch("another length", |c, odd| {
        c.all_reduce(BufferMut::from_slice(&mut vec![0f32; if odd { 3 } else { 2 }]), ReduceOp::Sum)
    }),
    mismatch("another length of a large buffer", |c, odd| {
        let num_elements = if odd { 1_000_001 } else { 1_000_000 };
        c.all_reduce(BufferMut::from_slice(&mut vec![0f32; num_elements]), ReduceOp::Sum)
    }),
    mismatch("another list", |c, odd| {
        let (mut a, mut b) = ([0f32; 2], [0f32; 2]);
        let mut list = vec![BufferMut::from_slice(&mut a)];
        if odd {
            list.push(BufferMut::from_slice(&mut b));
        }
        c.all_reduce_many(&mut list, ReduceOp::Sum)
    }),
    mismatch("another root", |c, odd| c.broadcast(BufferMut::from_slice(&mut [0u8]), usize::from(odd))),
    mismatch("another broadcast length", |c, odd| {
        c.broadcast(BufferMut::from_slice(&mut vec![0f32; if odd { 3 } else { 2 }]), 0)
    }),
    mismatch("other lengths to gather", |c, odd| {
        let mut lengths = vec![2; c.world_size()];
        if odd {
            // This rank's own length is right, so that nothing is wrong on it alone.
            lengths[(c.rank() + 1) % c.world_size()] = 3;
        }
        let mut output = vec![0u8; lengths.iter().sum()];
        c.all_gather(Buffer::from_slice(&[0u8; 2]), &lengths, BufferMut::from_slice(&mut output))
    }),
    mismatch("other lengths to scatter", |c, odd| {
        let mut lengths = vec![2; c.world_size()];
        if odd {
            lengths[(c.rank() + 1) % c.world_size()] = 3;
        }
        let input = vec![0f32; lengths.iter().sum()];
        let output = &mut [0f32; 2];
        c.reduce_scatter(Buffer::from_slice(&input), &lengths, BufferMut::from_slice(output), ReduceOp::Sum)
    }),
    // CASES 39
    impatient("a rank that never arrives times out on every other rank", missing_rank),
    impatient("a receiver that never arrives times out on the sender", missing_receiver),
    prompt("an abort breaks the group for every rank at once", 1, abort),
    prompt("a transfer of another dtype fails on both ranks", 2, wrong_transfer),
    prompt("ranks that wait for each other to receive learn it at once", 2, crossed_sends),
    // CASES 25
    prompt("a mean of integers is refused on every rank", 1, |c| {
        let refused = c.all_reduce(BufferMut::from_slice(&mut [1i32]), ReduceOp::Mean);
        assert_unsupported(c, refused, ReduceOp::Mean, DType::I32);
    }),
    prompt("a sum of bools is refused on every rank", 1, |c| {
        let refused = c.all_reduce(BufferMut::new(DType::Bool, &mut [1]).expect("whole"), ReduceOp::Sum);
        assert_unsupported(c, refused, ReduceOp::Sum, DType::Bool);
    }),
    prompt("a rank outside the group is refused", 1, |c| {
        let root = c.world_size();
        let refused = c.broadcast(BufferMut::from_slice(&mut [1i32]), root);
        assert!(matches!(refused, Err(CollectiveError::WrongRank { argument: "root", value, .. }) if value == root));
        assert_stays_broken(c);
    }),
    prompt("lengths that do not fit are refused", 1, |c| {
        let lengths = vec![2; c.world_size()];
        let (mut output, output_length) = (vec![0u8; 2 * c.world_size() + 1], 2 * c.world_size());
        let refused = c.all_gather(Buffer::from_slice(&[1u8; 2]), &lengths, BufferMut::from_slice(&mut output));
        assert!(matches!(refused, Err(CollectiveError::WrongLength { expected, .. }) if expected == output_length));
        assert_stays_broken(c);
    }),
];

/// Longer than any of these checks may take, so that a wait for the timeout shows.
const LONG: Duration = Duration::from_secs(8);

/// What must not take longer than waking a few threads.
const PROMPT: Duration = Duration::from_secs(4);

const fn prompt(name: &'static str, min_world_size: usize, run: fn(&dyn Communicator)) -> Check {
    Check { name, min_world_size, program: Program::Each(run), timeout: LONG }
}

const fn impatient(name: &'static str, run: fn(&dyn Communicator)) -> Check {
    Check { name, min_world_size: 2, program: Program::Each(run), timeout: Duration::from_millis(300) }
}

const fn mismatch(name: &'static str, call: Call) -> Check {
    Check { name, min_world_size: 2, program: Program::OddOneOut(call), timeout: LONG }
}

/// One rank differs from all others: every rank must say which.
pub(super) fn odd_one_out(communicator: &dyn Communicator, name: &str, odd: usize, call: Call) {
    let started = Instant::now();
    let result = call(communicator, communicator.rank() == odd);
    assert!(started.elapsed() < PROMPT, "{name}: {:?}", started.elapsed());
    match result {
        Err(CollectiveError::Mismatch { rank, world_size, differing, given, expected, .. }) => {
            assert_eq!((rank, world_size), (communicator.rank(), communicator.world_size()), "{name}");
            assert_eq!(differing, odd, "{name}: gave {given}, expected {expected}");
            assert_ne!(given, expected, "{name}");
        }
        other => panic!("{name}: must be a mismatch, is {other:?}"),
    }
    assert_stays_broken(communicator);
}

fn missing_rank(communicator: &dyn Communicator) {
    let (rank, world_size) = (communicator.rank(), communicator.world_size());
    let missing_rank = world_size - 1;
    if rank == missing_rank {
        thread::sleep(2 * communicator.timeout());
        let late = communicator.all_reduce(BufferMut::from_slice(&mut [1f32]), ReduceOp::Sum);
        let Err(CollectiveError::Broken { cause, .. }) = late else { panic!("too late, but {late:?}") };
        assert!(matches!(&*cause, CollectiveError::Timeout { missing, .. } if *missing == [rank]));
    } else {
        let started = Instant::now();
        let mut value = [1f32];
        let result = communicator.all_reduce(BufferMut::from_slice(&mut value), ReduceOp::Sum);
        assert!(started.elapsed() < communicator.timeout() + PROMPT);
        let Err(CollectiveError::Timeout { rank: of, collective, missing, .. }) = result else {
            panic!("nobody came, but {result:?}")
        };
        assert_eq!((of, collective), (rank, Collective::AllReduce));
        assert_eq!(missing, [missing_rank]);
        assert_eq!(value, [1.0], "a failed collective changes nothing");
    }
    assert_stays_broken(communicator);
}

fn missing_receiver(communicator: &dyn Communicator) {
    if communicator.rank() == 0 {
        let result = communicator.send(Buffer::from_slice(&[1u8]), 1);
        let Err(CollectiveError::Timeout { collective: Collective::Send, missing, .. }) = result else {
            panic!("nobody came, but {result:?}")
        };
        assert_eq!(missing, [1]);
    } else {
        thread::sleep(2 * communicator.timeout());
    }
    assert_stays_broken(communicator);
}

fn abort(communicator: &dyn Communicator) {
    let started = Instant::now();
    if communicator.rank() == 0 {
        // Whether the others wait by now or come later, it is the same to them.
        thread::sleep(Duration::from_millis(20));
        communicator.abort("the loss is NaN");
        communicator.abort("a second cause");
    }
    let result = communicator.barrier();
    let Err(CollectiveError::Broken { cause, .. }) = result else { panic!("aborted, but {result:?}") };
    assert_eq!(
        *cause,
        CollectiveError::Aborted {
            rank: 0,
            world_size: communicator.world_size(),
            reason: "the loss is NaN".to_owned(),
        }
    );
    assert!(started.elapsed() < PROMPT);
    assert_stays_broken(communicator);
}

fn wrong_transfer(communicator: &dyn Communicator) {
    let result = match communicator.rank() {
        0 => communicator.send(Buffer::from_slice(&[1f32]), 1),
        1 => communicator.recv(BufferMut::from_slice(&mut [1i32]), 0),
        _ => communicator.barrier(),
    };
    match result {
        Err(CollectiveError::Mismatch { rank, .. }) => assert!(rank < 2),
        Err(CollectiveError::Broken { .. }) => assert!(communicator.rank() >= 2),
        other => panic!("another dtype, but {other:?}"),
    }
    assert_stays_broken(communicator);
}

fn crossed_sends(communicator: &dyn Communicator) {
    let started = Instant::now();
    let next = (communicator.rank() + 1) % communicator.world_size();
    let result = communicator.send(Buffer::from_slice(&[1u8]), next);
    assert!(matches!(result, Err(CollectiveError::Mismatch { .. })), "nobody receives, but {result:?}");
    assert!(started.elapsed() < PROMPT);
    assert_stays_broken(communicator);
}

fn assert_unsupported(
    communicator: &dyn Communicator,
    result: Result<(), CollectiveError>,
    op: ReduceOp,
    dtype: DType,
) {
    let (rank, world_size) = (communicator.rank(), communicator.world_size());
    let collective = Collective::AllReduce;
    let refused = CollectiveError::UnsupportedReduction { rank, world_size, collective, op, dtype };
    assert_eq!(result, Err(refused));
    assert_stays_broken(communicator);
}

/// Every later call fails at once and with one and the same first cause.
fn assert_stays_broken(communicator: &dyn Communicator) {
    let started = Instant::now();
    let other = usize::from(communicator.rank() == 0);
    let lengths = vec![1; communicator.world_size()];
    let (mut one, mut all) = ([0f32], vec![0f32; communicator.world_size()]);
    let mut causes = Vec::new();
    let mut refuse = |expected, result| match result {
        Err(CollectiveError::Broken { rank, collective, cause, .. }) => {
            assert_eq!((rank, collective), (communicator.rank(), expected));
            causes.push(cause);
        }
        other => panic!("{expected} on a broken group must be refused, is {other:?}"),
    };
    refuse(Collective::AllReduce, communicator.all_reduce(BufferMut::from_slice(&mut one), ReduceOp::Sum));
    refuse(Collective::Barrier, communicator.barrier());
    refuse(Collective::Broadcast, communicator.broadcast(BufferMut::from_slice(&mut one), 0));
    refuse(
        Collective::AllGather,
        communicator.all_gather(Buffer::from_slice(&[1f32]), &lengths, BufferMut::from_slice(&mut all)),
    );
    refuse(
        Collective::ReduceScatter,
        communicator.reduce_scatter(Buffer::from_slice(&all), &lengths, BufferMut::from_slice(&mut one), ReduceOp::Sum),
    );
    if communicator.world_size() > 1 {
        refuse(Collective::Send, communicator.send(Buffer::from_slice(&[1f32]), other));
        refuse(Collective::Recv, communicator.recv(BufferMut::from_slice(&mut one), other));
    }
    assert!(causes.iter().all(|cause| *cause == causes[0]), "the first cause stays: {causes:?}");
    assert!(started.elapsed() < PROMPT);
}
