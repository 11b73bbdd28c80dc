//! Checks of what collectives leave in the buffers.

use std::time::Duration;

use half::f16;

use super::{
    Check, Program, must,
    oracle::{self, Random, assert_same},
};
use crate::{Buffer, BufferMut, Communicator, DType, ReduceOp};

/// Checks that leave the group as sound as it was.
pub const RESULTS: &[Check] = &[
    check("every dtype and reduction equals the sequential reduction", every_reduction),
    check("unequal and zero lengths are scattered and gathered", unequal_lengths),
    check("a broadcast gives every rank the root's bytes", every_root),
    check("every pair of ranks can transfer both ways", every_transfer),
    check("large buffers take the same values as small ones", large_buffers),
    check("a list of mixed dtypes is reduced as its buffers would be", mixed_list),
    check("bytes of any alignment are reduced", unaligned_bytes),
    check("integers and bools arrive exactly", exact_integers),
    check("means of halves neither overflow nor vanish", means_of_halves),
    check("back to back collectives of changing shapes do not mix", changing_shapes),
    check("two runs give the same bits", repeated_runs),
];

const fn check(name: &'static str, run: fn(&dyn Communicator)) -> Check {
    Check { name, min_world_size: 1, program: Program::Each(run), timeout: Duration::from_secs(10) }
}

/// Reduces a list of (dtype, elements) in one collective, and compares.
///
/// # Panics
///
/// If the result is not the sequential reduction.
pub fn all_reduce_case(communicator: &dyn Communicator, seed: u64, list: &[(DType, usize)], op: ReduceOp) {
    let given =
        |index: usize, rank| oracle::values(seed.wrapping_add(index as u64), rank, list[index].0, list[index].1);
    let mut actual: Vec<Vec<u8>> = (0..list.len()).map(|index| given(index, communicator.rank())).collect();
    let mut views: Vec<BufferMut<'_>> =
        actual.iter_mut().zip(list).map(|(bytes, &(dtype, _))| view(dtype, bytes)).collect();
    must(communicator.all_reduce_many(&mut views, op));
    for (index, &(dtype, _)) in list.iter().enumerate() {
        let ranks: Vec<_> = (0..communicator.world_size()).map(|rank| given(index, rank)).collect();
        let expected = oracle::reduce(dtype, op, &ranks);
        assert_same(&format!("all_reduce {op} of buffer {index}"), dtype, &actual[index], &expected);
    }
}

/// Reduces and scatters segments of these lengths, and compares.
///
/// # Panics
///
/// If the result is not this rank's segment of the sequential reduction.
pub fn reduce_scatter_case(communicator: &dyn Communicator, seed: u64, dtype: DType, lengths: &[usize], op: ReduceOp) {
    let (rank, size) = (communicator.rank(), dtype.size_bytes());
    let given = |rank| oracle::values(seed, rank, dtype, lengths.iter().sum());
    let mut actual = vec![0; lengths[rank] * size];
    let input = given(rank);
    must(communicator.reduce_scatter(read(dtype, &input), lengths, view(dtype, &mut actual), op));
    let ranks: Vec<_> = (0..communicator.world_size()).map(given).collect();
    let start = lengths[..rank].iter().sum::<usize>() * size;
    let expected = &oracle::reduce(dtype, op, &ranks)[start..start + actual.len()];
    assert_same(&format!("reduce_scatter {op} of {lengths:?}"), dtype, &actual, expected);
}

/// Gathers segments of these lengths, and compares.
///
/// # Panics
///
/// If the result is not all segments in rank order.
pub fn all_gather_case(communicator: &dyn Communicator, seed: u64, dtype: DType, lengths: &[usize]) {
    let given = |rank: usize| oracle::values(seed, rank, dtype, lengths[rank]);
    let expected: Vec<u8> = (0..communicator.world_size()).flat_map(given).collect();
    let mut actual = vec![0xA5; expected.len()];
    let input = given(communicator.rank());
    must(communicator.all_gather(read(dtype, &input), lengths, view(dtype, &mut actual)));
    assert_eq!(actual, expected, "all_gather of {lengths:?} {dtype}");
}

/// Broadcasts from `root`, and compares.
///
/// # Panics
///
/// If the result is not what the root gave.
pub fn broadcast_case(communicator: &dyn Communicator, seed: u64, dtype: DType, num_elements: usize, root: usize) {
    let mut actual = oracle::values(seed, communicator.rank(), dtype, num_elements);
    must(communicator.broadcast(view(dtype, &mut actual), root));
    assert_eq!(actual, oracle::values(seed, root, dtype, num_elements), "broadcast of {dtype} from {root}");
}

/// Transfers between two ranks while the others do nothing, and compares.
///
/// # Panics
///
/// If what is received is not what was sent.
pub fn transfer_case(
    communicator: &dyn Communicator,
    seed: u64,
    dtype: DType,
    num_elements: usize,
    (from, to): (usize, usize),
) {
    let sent = oracle::values(seed, from, dtype, num_elements);
    if communicator.rank() == from {
        must(communicator.send(read(dtype, &sent), to));
    } else if communicator.rank() == to {
        let mut actual = vec![0xA5; sent.len()];
        must(communicator.recv(view(dtype, &mut actual), from));
        assert_eq!(actual, sent, "transfer of {dtype} from {from} to {to}");
    }
}

fn every_reduction(communicator: &dyn Communicator) {
    for op in ReduceOp::ALL {
        for dtype in DType::ALL.into_iter().filter(|&dtype| op.supports(dtype)) {
            for num_elements in [0, 1, 7, 64, 1000] {
                all_reduce_case(communicator, num_elements as u64, &[(dtype, num_elements)], op);
            }
        }
    }
}

fn unequal_lengths(communicator: &dyn Communicator) {
    let world_size = communicator.world_size();
    let shapes: [fn(usize) -> usize; 5] =
        [|_| 0, |_| 5, |rank| rank, |rank| if rank == 0 { 33 } else { 0 }, |rank| 1000 - 300 * rank.min(3)];
    for (seed, length) in shapes.iter().enumerate() {
        let lengths: Vec<usize> = (0..world_size).map(length).collect();
        for dtype in DType::ALL {
            all_gather_case(communicator, seed as u64, dtype, &lengths);
            for op in ReduceOp::ALL.into_iter().filter(|op| op.supports(dtype)) {
                reduce_scatter_case(communicator, seed as u64, dtype, &lengths, op);
            }
        }
    }
}

fn every_root(communicator: &dyn Communicator) {
    for root in 0..communicator.world_size() {
        for dtype in DType::ALL {
            for num_elements in [0, 1, 257] {
                broadcast_case(communicator, root as u64, dtype, num_elements, root);
            }
        }
    }
}

fn every_transfer(communicator: &dyn Communicator) {
    let world_size = communicator.world_size();
    for from in 0..world_size {
        for to in (0..world_size).filter(|&to| to != from) {
            for dtype in DType::ALL {
                transfer_case(communicator, 3, dtype, 100 * from + to, (from, to));
            }
        }
    }
    // Between collectives too, and with the others already waiting in the next one.
    must(communicator.barrier());
    if world_size > 1 {
        transfer_case(communicator, 4, DType::F32, 100_000, (0, world_size - 1));
    }
    must(communicator.barrier());
}

/// Beyond what an implementation does in one piece, or leaves to one rank.
fn large_buffers(communicator: &dyn Communicator) {
    let world_size = communicator.world_size();
    for dtype in [DType::F64, DType::BF16] {
        let num_elements = (1 << 20) / dtype.size_bytes() / world_size + 3;
        let lengths: Vec<usize> = (0..world_size).map(|rank| rank % 3 * num_elements / world_size).collect();
        all_reduce_case(communicator, 5, &[(dtype, num_elements)], ReduceOp::Sum);
        reduce_scatter_case(communicator, 6, dtype, &lengths, ReduceOp::Max);
        all_gather_case(communicator, 7, dtype, &lengths);
        broadcast_case(communicator, 8, dtype, num_elements, world_size - 1);
    }
}

fn mixed_list(communicator: &dyn Communicator) {
    let floats = [(DType::F16, 3), (DType::F64, 700), (DType::BF16, 0), (DType::F32, 12_001)];
    all_reduce_case(communicator, 9, &floats, ReduceOp::Mean);
    let mixed = [(DType::I8, 13), (DType::F32, 1), (DType::I64, 200), (DType::U16, 77)];
    all_reduce_case(communicator, 10, &mixed, ReduceOp::Sum);
    let many: Vec<_> = (0..300).map(|index| (DType::F32, index % 50)).collect();
    all_reduce_case(communicator, 11, &many, ReduceOp::Min);
    all_reduce_case(communicator, 12, &[], ReduceOp::Sum);
}

fn unaligned_bytes(communicator: &dyn Communicator) {
    for dtype in DType::ALL.into_iter().filter(|&dtype| ReduceOp::Sum.supports(dtype)) {
        let given = |rank| oracle::values(13, rank, dtype, 2100);
        let mut padded = vec![0; 1];
        padded.extend(given(communicator.rank()));
        must(communicator.all_reduce(view(dtype, &mut padded[1..]), ReduceOp::Sum));
        let ranks: Vec<_> = (0..communicator.world_size()).map(given).collect();
        let expected = oracle::reduce(dtype, ReduceOp::Sum, &ranks);
        assert_same("all_reduce of unaligned bytes", dtype, &padded[1..], &expected);
    }
}

/// CASES 25
fn exact_integers(communicator: &dyn Communicator) {
    let large = (1i64 << 53) + 1;
    let mut value = [if communicator.rank() == 0 { large } else { 0 }];
    must(communicator.broadcast(BufferMut::from_slice(&mut value), 0));
    assert_eq!(value, [large]);
    must(communicator.all_reduce(BufferMut::from_slice(&mut value), ReduceOp::Sum));
    assert_eq!(value, [large * communicator.world_size() as i64]);
    let mut flags = if communicator.rank() == 0 { [1, 0, 1] } else { [0; 3] };
    must(communicator.broadcast(view(DType::Bool, &mut flags), 0));
    assert_eq!(flags, [1, 0, 1]);
}

/// CASES 23
fn means_of_halves(communicator: &dyn Communicator) {
    // 6e-8 rounds to the smallest positive half; divided first, it would vanish.
    for (given, mean) in [(40000.0, 40000.0), (6e-8, 5.960_464_5e-8), (2000.0, 2000.0)] {
        let mut values = [f16::from_f32(given); 3];
        must(communicator.all_reduce(BufferMut::from_slice(&mut values), ReduceOp::Mean));
        assert_eq!(values.map(f16::to_f32), [mean; 3]);
    }
}

/// CASES 35
fn changing_shapes(communicator: &dyn Communicator) {
    let (rank, world_size) = (communicator.rank(), communicator.world_size());
    let total = |round: usize| (round * world_size + world_size * (world_size - 1) / 2) as f32;
    for round in 0..1000 {
        let mut values = vec![(round + rank) as f32; [2, 3, 1][round % 3]];
        let mut second = values.clone();
        let mut list = vec![BufferMut::from_slice(&mut values)];
        if round % 3 == 1 {
            list.push(BufferMut::from_slice(&mut second));
        }
        must(communicator.all_reduce_many(&mut list, ReduceOp::Sum));
        assert!(values.iter().all(|&value| value == total(round)), "round {round}: {values:?}");
        if round % 3 == 1 {
            assert_eq!(values, second);
        }
    }
}

fn repeated_runs(communicator: &dyn Communicator) {
    let run = || {
        let mut random = Random::new(14, communicator.rank());
        let float = |_| (random.bits() as f32) * 1e-3 - 1e16;
        let mut values: Vec<f32> = (0..50_000).map(float).collect();
        must(communicator.all_reduce(BufferMut::from_slice(&mut values), ReduceOp::Mean));
        values.into_iter().map(f32::to_bits).collect::<Vec<_>>()
    };
    let first = run();
    assert!(first == run(), "two runs differ");
    let lengths = vec![first.len(); communicator.world_size()];
    let mut all = vec![0; first.len() * communicator.world_size()];
    must(communicator.all_gather(Buffer::from_slice(&first), &lengths, BufferMut::from_slice(&mut all)));
    assert!(all.chunks(first.len()).all(|of_rank| of_rank == first), "ranks differ");
}

fn view(dtype: DType, bytes: &mut [u8]) -> BufferMut<'_> {
    BufferMut::new(dtype, bytes).expect("a whole number of elements")
}

fn read(dtype: DType, bytes: &[u8]) -> Buffer<'_> {
    Buffer::new(dtype, bytes).expect("a whole number of elements")
}
