//! What each collective exchanges once all ranks have met.
//!
//! Data that is small on the rank it comes from goes with the header. Of large data each rank reduces a share: chunk by
//! chunk it receives that share of all ranks, reduces it in rank order, and sends it to all while the next chunk comes.

use core::ops::Range;

use super::{
    header::Terms,
    list::List,
    plan::{self, Chunk},
    round::{INLINE_BYTES, Round},
};
use crate::{
    Buffer, BufferMut, CollectiveError, Incoming, Outgoing, ReduceOp, Transport,
    reduce::{Reduction, Scratch},
};

/// Large buffers go in messages of at most this many bytes.
const MESSAGE_BYTES: usize = 1 << 30;

pub(super) fn all_reduce<T: Transport>(
    round: &mut Round<'_, T>,
    terms: &Terms<'_>,
    buffers: &mut [BufferMut<'_>],
    op: ReduceOp,
) -> Result<(), CollectiveError> {
    let num_bytes: usize = buffers.iter().map(|buffer| buffer.num_bytes()).sum();
    if num_bytes > INLINE_BYTES {
        round.meet(terms, |_, _| {})?;
        if buffers.iter().all(|buffer| round.is_native(buffer.dtype(), op)) {
            return buffers.iter_mut().try_for_each(|buffer| round.all_reduce(buffer, op));
        }
        return all_reduce_large(round, buffers, op);
    }
    round.meet(terms, |_, message| buffers.iter().for_each(|buffer| message.extend(buffer.as_bytes())))?;
    let world_size = round.world_size();
    let given = (0..world_size).map(|rank| round.inline_of(rank, num_bytes)).collect::<Result<Vec<_>, _>>()?;
    if world_size == 1 {
        // Sum, mean, largest and smallest of one value are that value.
        return Ok(());
    }
    let mut scratch = Scratch::new();
    let mut start = 0;
    for buffer in buffers {
        let dtype = buffer.dtype();
        let output = buffer.as_bytes_mut();
        Reduction { op, dtype, world_size }.run(
            &mut scratch,
            0..output.len(),
            |rank, block| &given[rank][start + block.start..start + block.end],
            |block, values| output[block].copy_from_slice(values),
        );
        start += output.len();
    }
    Ok(())
}

/// In step `k` every rank sends chunk `k` of each other rank's share to it, and chunk `k - 1` of its own share, reduced, to
/// all; then it reduces chunk `k` of its share.
fn all_reduce_large<T: Transport>(
    round: &mut Round<'_, T>,
    buffers: &mut [BufferMut<'_>],
    op: ReduceOp,
) -> Result<(), CollectiveError> {
    let (rank, world_size) = (round.rank(), round.world_size());
    let others: Vec<usize> = round.others().collect();
    if others.is_empty() {
        return Ok(());
    }
    let lengths: Vec<usize> = buffers.iter().map(|buffer| buffer.num_bytes()).collect();
    let shares = plan::shares(&lengths, world_size);
    let num_chunks = shares.iter().map(Vec::len).max().unwrap_or(0);
    let list = List::new(buffers);
    let mut scratch = Scratch::new();
    // By rank: what is sent to it, what it sent of this rank's share, what it sent of its share.
    let (mut packed, mut raw, mut reduced) = (rooms(world_size), rooms(world_size), rooms(world_size));
    for step in 0..=num_chunks {
        let now = |rank: usize| shares[rank].get(step);
        let previous = |rank: usize| step.checked_sub(1).and_then(|step| shares[rank].get(step));
        for (to, packed) in packed.iter_mut().enumerate() {
            if let Some(chunk) = if to == rank { previous(to) } else { now(to) } {
                list.pack(chunk, packed);
            }
        }
        let mut outgoing = Vec::with_capacity(2 * others.len());
        let mut incoming = Vec::with_capacity(2 * others.len());
        for &to in &others {
            // SAFETY: of this list, this step writes chunks of other ranks' shares that went out in the step before.
            let mut send = |chunk, packed| outgoing.push(Outgoing::new(to, unsafe { list.given(chunk, packed) }));
            now(to).into_iter().for_each(|chunk| send(chunk, &packed[to]));
            previous(rank).into_iter().for_each(|chunk| send(chunk, &packed[rank]));
        }
        for ((from, raw), reduced) in
            raw.iter_mut().enumerate().zip(&mut reduced).filter(|((from, _), _)| *from != rank)
        {
            if let Some(chunk) = now(rank) {
                raw.resize(chunk.num_bytes, 0);
                incoming.push(Incoming::new(from, raw));
            }
            if let Some(chunk) = previous(from) {
                // SAFETY: this is the only access to this chunk in this step; shares do not overlap.
                incoming.push(Incoming::new(from, unsafe { list.taken(chunk, reduced) }));
            }
        }
        round.exchange(&mut outgoing, &mut incoming)?;
        for &from in &others {
            previous(from).into_iter().for_each(|chunk| list.unpack(chunk, &reduced[from]));
        }
        if let Some(chunk) = now(rank) {
            list.reduce(chunk, &raw, (rank, op), &mut scratch);
        }
    }
    Ok(())
}

pub(super) fn reduce_scatter<T: Transport>(
    round: &mut Round<'_, T>,
    terms: &Terms<'_>,
    input: Buffer<'_>,
    mut output: BufferMut<'_>,
    op: ReduceOp,
) -> Result<(), CollectiveError> {
    let (rank, world_size, dtype) = (round.rank(), round.world_size(), output.dtype());
    let segments = segments(terms);
    let bytes = input.as_bytes();
    let is_inline = |rank: usize| segments[rank].len() <= INLINE_BYTES;
    round.meet(terms, |to, message| {
        if is_inline(to) {
            message.extend(&bytes[segments[to].clone()]);
        }
    })?;
    let output = output.as_bytes_mut();
    let own = &bytes[segments[rank].clone()];
    let reduction = Reduction { op, dtype, world_size };
    let mut scratch = Scratch::new();
    if is_inline(rank) {
        let given = (0..world_size).map(|rank| round.inline_of(rank, own.len())).collect::<Result<Vec<_>, _>>()?;
        reduction.run(
            &mut scratch,
            0..own.len(),
            |rank, block| &given[rank][block],
            |block, values| output[block].copy_from_slice(values),
        );
    }
    // Large segments: in step `k` chunk `k` of each goes to its rank.
    let others: Vec<usize> = round.others().collect();
    let chunks = |rank: usize| if is_inline(rank) { Vec::new() } else { plan::stretch(segments[rank].clone()) };
    let chunks: Vec<Vec<Chunk>> = (0..world_size).map(chunks).collect();
    let mut raw = rooms(world_size);
    for step in 0..chunks.iter().map(Vec::len).max().unwrap_or(0) {
        let now = |rank: usize| chunks[rank].get(step).map(|chunk| chunk.parts[0].1.clone());
        let message = |&to: &usize| Some(Outgoing::new(to, &bytes[now(to)?]));
        let mut outgoing: Vec<_> = others.iter().filter_map(message).collect();
        let mut incoming = Vec::new();
        if let Some(range) = now(rank) {
            for (from, raw) in raw.iter_mut().enumerate().filter(|&(from, _)| from != rank) {
                raw.resize(range.len(), 0);
                incoming.push(Incoming::new(from, raw));
            }
        }
        round.exchange(&mut outgoing, &mut incoming)?;
        if let Some(range) = now(rank) {
            let start = range.start - segments[rank].start;
            reduction.run(
                &mut scratch,
                0..range.len(),
                |from, block| {
                    let given = if from == rank { &bytes[range.clone()] } else { &raw[from] };
                    &given[block]
                },
                |block, values| output[start + block.start..start + block.end].copy_from_slice(values),
            );
        }
    }
    Ok(())
}

pub(super) fn all_gather<T: Transport>(
    round: &mut Round<'_, T>,
    terms: &Terms<'_>,
    input: Buffer<'_>,
    mut output: BufferMut<'_>,
) -> Result<(), CollectiveError> {
    let rank = round.rank();
    let segments = segments(terms);
    let bytes = input.as_bytes();
    let is_inline = |rank: usize| segments[rank].len() <= INLINE_BYTES;
    round.meet(terms, |_, message| {
        if is_inline(rank) {
            message.extend(bytes);
        }
    })?;
    let mut outgoing = Vec::new();
    if !is_inline(rank) {
        for piece in bytes.chunks(MESSAGE_BYTES) {
            outgoing.extend(round.others().map(|to| Outgoing::new(to, piece)));
        }
    }
    let mut incoming = Vec::new();
    let mut rest = output.as_bytes_mut();
    for (from, segment) in segments.iter().enumerate() {
        let (room, behind) = rest.split_at_mut(segment.len());
        rest = behind;
        if from == rank {
            room.copy_from_slice(bytes);
        } else if is_inline(from) {
            room.copy_from_slice(round.inline_of(from, room.len())?);
        } else {
            incoming.extend(room.chunks_mut(MESSAGE_BYTES).map(|room| Incoming::new(from, room)));
        }
    }
    round.exchange(&mut outgoing, &mut incoming)
}

pub(super) fn broadcast<T: Transport>(
    round: &mut Round<'_, T>,
    terms: &Terms<'_>,
    mut buffer: BufferMut<'_>,
    root: usize,
) -> Result<(), CollectiveError> {
    let rank = round.rank();
    let is_inline = buffer.num_bytes() <= INLINE_BYTES;
    round.meet(terms, |_, message| {
        if is_inline && rank == root {
            message.extend(buffer.as_bytes());
        }
    })?;
    let room = buffer.as_bytes_mut();
    if rank == root {
        let pieces = if is_inline { &[] } else { &*room }.chunks(MESSAGE_BYTES);
        let mut outgoing: Vec<_> =
            pieces.flat_map(|piece| round.others().map(move |to| Outgoing::new(to, piece))).collect();
        round.exchange(&mut outgoing, &mut [])
    } else {
        take(round, room, root)
    }
}

pub(super) fn send<T: Transport>(
    round: &mut Round<'_, T>,
    terms: &Terms<'_>,
    buffer: Buffer<'_>,
    to: usize,
) -> Result<(), CollectiveError> {
    let bytes = buffer.as_bytes();
    let is_inline = bytes.len() <= INLINE_BYTES;
    round.meet(terms, |_, message| {
        if is_inline {
            message.extend(bytes);
        }
    })?;
    let pieces = if is_inline { &[] } else { bytes }.chunks(MESSAGE_BYTES);
    let mut outgoing: Vec<_> = pieces.map(|piece| Outgoing::new(to, piece)).collect();
    round.exchange(&mut outgoing, &mut [])
}

pub(super) fn recv<T: Transport>(
    round: &mut Round<'_, T>,
    terms: &Terms<'_>,
    mut buffer: BufferMut<'_>,
    from: usize,
) -> Result<(), CollectiveError> {
    round.meet(terms, |_, _| {})?;
    take(round, buffer.as_bytes_mut(), from)
}

/// Takes a whole buffer from one rank.
fn take<T: Transport>(round: &mut Round<'_, T>, room: &mut [u8], from: usize) -> Result<(), CollectiveError> {
    if room.len() <= INLINE_BYTES {
        room.copy_from_slice(round.inline_of(from, room.len())?);
        return Ok(());
    }
    let mut incoming: Vec<_> = room.chunks_mut(MESSAGE_BYTES).map(|room| Incoming::new(from, room)).collect();
    round.exchange(&mut [], &mut incoming)
}

/// Each rank's bytes of a buffer that is dealt out.
fn segments(terms: &Terms<'_>) -> Vec<Range<usize>> {
    let size = terms.shapes[0].0.size_bytes();
    let segment = |start: &mut usize, &length: &usize| {
        let range = *start..*start + length * size;
        *start = range.end;
        Some(range)
    };
    terms.lengths.iter().scan(0, segment).collect()
}

fn rooms(world_size: usize) -> Vec<Vec<u8>> {
    vec![Vec::new(); world_size]
}
