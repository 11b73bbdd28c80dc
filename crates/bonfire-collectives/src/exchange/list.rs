//! The buffers of an all_reduce while chunks of them come and go.

use core::marker::PhantomData;

use super::plan::Chunk;
use crate::{
    BufferMut, DType, ReduceOp,
    buffer::Region,
    reduce::{Reduction, Scratch},
};

/// A list of buffers, of which some bytes are sent while others are received.
pub(super) struct List<'b> {
    buffers: Vec<(DType, Region)>,
    borrow: PhantomData<&'b mut [u8]>,
}

impl<'b> List<'b> {
    pub(super) fn new(buffers: &'b mut [BufferMut<'_>]) -> Self {
        let buffers = buffers.iter().map(|buffer| (buffer.dtype(), buffer.region())).collect();
        Self { buffers, borrow: PhantomData }
    }

    /// Brings the parts of a chunk together in `packed`; one part can stay where it is.
    pub(super) fn pack(&self, chunk: &Chunk, packed: &mut Vec<u8>) {
        packed.clear();
        if chunk.parts.len() > 1 {
            for (index, range) in &chunk.parts {
                // SAFETY: `self` keeps the borrow, and bytes of the list are written in `unpack`, in `reduce` and through
                // `taken`, whose result nobody holds between two exchanges.
                packed.extend(unsafe { self.buffers[*index].1.bytes(range.clone()) });
            }
        }
    }

    /// Brings the parts of a chunk back to where they belong, if there are several.
    pub(super) fn unpack(&self, chunk: &Chunk, packed: &[u8]) {
        if chunk.parts.len() > 1 {
            for (index, range, place) in chunk.places() {
                // SAFETY: `self` keeps the exclusive borrow, and nobody holds bytes of the list between two exchanges.
                let part = unsafe { self.buffers[index].1.bytes_mut(range) };
                part.copy_from_slice(&packed[place]);
            }
        }
    }

    /// The bytes of a chunk, to send; `packed` if it is in parts.
    ///
    /// # Safety
    ///
    /// Nobody writes these bytes of the list while the result lives.
    pub(super) unsafe fn given<'a>(&'a self, chunk: &Chunk, packed: &'a [u8]) -> &'a [u8] {
        match &*chunk.parts {
            // SAFETY: `self` keeps the borrow, the caller keeps writers away.
            [(index, range)] => unsafe { self.buffers[*index].1.bytes(range.clone()) },
            _ => packed,
        }
    }

    /// Where the bytes of a chunk go when they are received; `packed` if it is in parts.
    ///
    /// # Safety
    ///
    /// Nobody else touches these bytes of the list while the result lives.
    pub(super) unsafe fn taken<'a>(&'a self, chunk: &Chunk, packed: &'a mut Vec<u8>) -> &'a mut [u8] {
        match &*chunk.parts {
            // SAFETY: `self` keeps the exclusive borrow, the caller keeps everyone else away.
            [(index, range)] => unsafe { self.buffers[*index].1.bytes_mut(range.clone()) },
            _ => {
                packed.resize(chunk.num_bytes, 0);
                packed
            }
        }
    }

    /// Reduces a chunk in place, with what each other rank gave, by rank.
    pub(super) fn reduce(&self, chunk: &Chunk, raw: &[Vec<u8>], (rank, op): (usize, ReduceOp), scratch: &mut Scratch) {
        for (index, range, place) in chunk.places() {
            let (dtype, region) = self.buffers[index];
            let offset = place.start;
            Reduction { op, dtype, world_size: raw.len() }.run(
                scratch,
                0..range.len(),
                |from, block| {
                    if from == rank {
                        // SAFETY: `self` keeps the borrow, and `run` has read a block when it writes it.
                        unsafe { region.bytes(range.start + block.start..range.start + block.end) }
                    } else {
                        &raw[from][offset + block.start..offset + block.end]
                    }
                },
                |block, values| {
                    // SAFETY: as above, and the borrow is exclusive.
                    let output = unsafe { region.bytes_mut(range.start + block.start..range.start + block.end) };
                    output.copy_from_slice(values);
                },
            );
        }
    }
}
