//! What each rank does with the buffers of all, once they are all there.
//!
//! In one step, shares of different ranks write disjoint bytes, and no share reads what another writes.

use std::sync::Arc;

use super::{deposit::Handed, round::Round};
use crate::{
    reduce::{Reduction, Scratch},
    share,
};

/// Reduces this rank's share of the buffers and writes it to every rank's.
pub(super) fn reduce_to_all(round: &Round<'_>, rank: usize) {
    reduce_share(round, rank, round.world_size());
}

/// Reduces this rank's share of the buffers and writes it to rank 0's.
pub(super) fn reduce_to_first(round: &Round<'_>, rank: usize) {
    reduce_share(round, rank, 1);
}

/// Reduces this rank's segment of the inputs into its output.
pub(super) fn reduce_segment(round: &Round<'_>, rank: usize) {
    let own = round.deposit(rank);
    let (output, dtype) = (own.outputs[0].region(), own.outputs[0].dtype());
    let start = own.lengths[..rank].iter().sum::<usize>() * dtype.size_bytes();
    let op = own.op.expect("a reduction that says how");
    Reduction { op, dtype, world_size: round.world_size() }.run(
        &mut Scratch::new(),
        0..own.outputs[0].num_bytes(),
        |rank, block| {
            let input = round.deposit(rank).inputs[0].region();
            // SAFETY: `rank` stays for the round; inputs are borrowed shared, so nobody writes them.
            unsafe { input.bytes(start + block.start..start + block.end) }
        },
        |block, values| {
            // SAFETY: `rank` stays for the round; its output is borrowed exclusively and only its share writes it.
            let output = unsafe { output.bytes_mut(block) };
            output.copy_from_slice(values);
        },
    );
}

/// Copies all inputs into this rank's output, one after the other.
pub(super) fn gather(round: &Round<'_>, rank: usize) {
    let output = round.deposit(rank).outputs[0].region();
    let mut start = 0;
    for from in 0..round.world_size() {
        let input = round.deposit(from).inputs[0];
        let segment = start..start + input.num_bytes();
        start = segment.end;
        // SAFETY: `rank` stays for the round; its output is borrowed exclusively and only its share writes it.
        let output = unsafe { output.bytes_mut(segment) };
        output.copy_from_slice(input.as_bytes());
    }
}

/// Copies the root's buffer into this rank's.
pub(super) fn copy_from_root(round: &Round<'_>, rank: usize) {
    let own = round.deposit(rank);
    let root = own.other.expect("a broadcast that names its root");
    if rank == root {
        return;
    }
    let output = own.outputs[0].region();
    // SAFETY: `rank` stays for the round, and only its share writes its buffer.
    let output = unsafe { output.bytes_mut(0..own.outputs[0].num_bytes()) };
    output.copy_from_slice(round.deposit(root).outputs[0].as_bytes());
}

/// Copies what one of two ranks sends into what the other receives; `rank` is either.
pub(super) fn transfer(round: &Round<'_>, rank: usize) {
    let own = round.deposit(rank);
    let theirs = round.deposit(own.other.expect("a transfer that names its other rank"));
    let (sent, received) = if own.inputs.is_empty() { (theirs, own) } else { (own, theirs) };
    let received = &received.outputs[0];
    // SAFETY: both ranks stay for the round; of the two only one works, and the sender's buffer is another.
    let output = unsafe { received.region().bytes_mut(0..received.num_bytes()) };
    output.copy_from_slice(sent.inputs[0].as_bytes());
}

/// Collects a pointer to every rank's value of type `Arc<T>` in this rank's result.
pub(super) fn collect_values<T: 'static>(round: &Round<'_>, rank: usize) {
    let result = handed(round, rank).result.cast::<Vec<Arc<T>>>();
    // SAFETY: results of `exchange` are of this type, which follows from that of the values, which were compared;
    // it lies on the stack of a rank that stays for the round, and only that rank's share touches it.
    let result = unsafe { &mut *result };
    for from in 0..round.world_size() {
        // SAFETY: values of `exchange` are of this type.
        let value = unsafe { value_of::<Arc<T>>(round, from) };
        result.push(value.clone());
    }
}

/// Collects a pointer to each of rank 0's buffers, of type `S`, in this rank's result.
pub(super) fn collect_first<S: 'static>(round: &Round<'_>, rank: usize) {
    let result = handed(round, rank).result.cast::<Vec<Arc<S>>>();
    // SAFETY: results of `all_reduce_shared` are of this type, which follows from that of the values, which were
    // compared; it lies on the stack of a rank that stays for the round, and only that rank's share touches it.
    let result = unsafe { &mut *result };
    // SAFETY: values of `all_reduce_shared` are of this type.
    let buffers = unsafe { value_of::<Vec<Arc<S>>>(round, 0) };
    result.extend(buffers.iter().cloned());
}

/// Reduces this rank's share of the buffers and writes it to those of the first `num_written` ranks.
fn reduce_share(round: &Round<'_>, rank: usize, num_written: usize) {
    let own = round.deposit(rank);
    let (world_size, op) = (round.world_size(), own.op.expect("a reduction that says how"));
    if world_size == 1 {
        // Sum, mean, largest and smallest of one value are that value.
        return;
    }
    let num_bytes = own.outputs.iter().map(|buffer| buffer.num_bytes());
    let mut scratch = Scratch::new();
    for (index, range) in share::pieces(num_bytes, rank, world_size) {
        let region = |rank: usize| round.deposit(rank).outputs[index].region();
        let dtype = own.outputs[index].dtype();
        Reduction { op, dtype, world_size }.run(
            &mut scratch,
            range,
            // SAFETY: all ranks stay for the round; shares are disjoint, and `run` has read a block when it writes it.
            |rank, block| unsafe { region(rank).bytes(block) },
            |block, values| {
                for rank in 0..num_written {
                    // SAFETY: as above, and the buffers of a list are borrowed exclusively.
                    let output = unsafe { region(rank).bytes_mut(block.clone()) };
                    output.copy_from_slice(values);
                }
            },
        );
    }
}

fn handed<'r>(round: &'r Round<'_>, rank: usize) -> &'r Handed {
    round.deposit(rank).handed.as_ref().expect("a collective that hands something over")
}

/// # Safety
///
/// The round's calls hand over values of type `V`.
unsafe fn value_of<'r, V: 'static>(round: &'r Round<'_>, rank: usize) -> &'r V {
    let value = handed(round, rank).value.cast::<V>();
    // SAFETY: the types of all ranks' values were compared; the value lies on the stack of a rank that stays
    // for the round and does not touch it meanwhile.
    unsafe { &*value }
}
