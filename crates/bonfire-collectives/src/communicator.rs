//! The collectives every transport offers.

use std::time::Duration;

use crate::{Buffer, BufferMut, CollectiveError, ReduceOp};

/// One rank's end of a group of ranks.
///
/// All ranks call the same collectives in the same order with matching arguments. A call returns when
/// this rank's part is done and nobody touches its buffers any more. Every wait ends within
/// [`timeout`](Self::timeout), and an error breaks the group for good, see [`CollectiveError`].
///
/// # Errors
///
/// Any method that gives a `Result` can fail with
///
/// - [`CollectiveError::Timeout`] if ranks do not come in time,
/// - [`CollectiveError::Mismatch`] if ranks come with something else,
/// - [`CollectiveError::Broken`] if the group was broken before or meanwhile, by anything in this list, by
///   a rank that ended or by [`abort`](Self::abort).
///
/// A method's own section lists what else it refuses.
pub trait Communicator: Send + Sync {
    /// This rank, below [`world_size`](Self::world_size).
    fn rank(&self) -> usize;

    /// The number of ranks in the group.
    fn world_size(&self) -> usize;

    /// How long a call waits for other ranks.
    fn timeout(&self) -> Duration;

    /// Replaces `buffer` on every rank by the reduction of all ranks' buffers.
    ///
    /// # Errors
    ///
    /// [`CollectiveError::UnsupportedReduction`] if `op` cannot reduce the buffer's dtype.
    fn all_reduce(&self, mut buffer: BufferMut<'_>, op: ReduceOp) -> Result<(), CollectiveError> {
        self.all_reduce_many(core::slice::from_mut(&mut buffer), op)
    }

    /// Replaces each buffer of a list on every rank by the reduction of all ranks' buffers, in one collective.
    ///
    /// Dtypes may be mixed; an empty list or buffer is fine.
    ///
    /// # Errors
    ///
    /// [`CollectiveError::UnsupportedReduction`] if `op` cannot reduce a buffer's dtype.
    fn all_reduce_many(&self, buffers: &mut [BufferMut<'_>], op: ReduceOp) -> Result<(), CollectiveError>;

    /// Reduces all ranks' `input` and leaves each rank its segment, of `lengths[rank]` elements, in `output`.
    ///
    /// Segments lie in the input in rank order; lengths may differ and may be 0.
    ///
    /// # Errors
    ///
    /// [`CollectiveError::UnsupportedReduction`] if `op` cannot reduce the dtype,
    /// [`CollectiveError::WrongLength`] if `lengths`, input and output do not fit together,
    /// [`CollectiveError::WrongDType`] if input and output differ in dtype.
    fn reduce_scatter(
        &self,
        input: Buffer<'_>,
        lengths: &[usize],
        output: BufferMut<'_>,
        op: ReduceOp,
    ) -> Result<(), CollectiveError>;

    /// Leaves the inputs of all ranks, of `lengths[rank]` elements each, in rank order in every rank's `output`.
    ///
    /// Lengths may differ and may be 0.
    ///
    /// # Errors
    ///
    /// [`CollectiveError::WrongLength`] if `lengths`, input and output do not fit together,
    /// [`CollectiveError::WrongDType`] if input and output differ in dtype.
    fn all_gather(&self, input: Buffer<'_>, lengths: &[usize], output: BufferMut<'_>) -> Result<(), CollectiveError>;

    /// Replaces `buffer` on every rank by that of `root`.
    ///
    /// # Errors
    ///
    /// [`CollectiveError::WrongRank`] if `root` is not a rank of this group.
    fn broadcast(&self, buffer: BufferMut<'_>, root: usize) -> Result<(), CollectiveError>;

    /// Waits until every rank has come here.
    ///
    /// # Errors
    ///
    /// Those of every collective.
    fn barrier(&self) -> Result<(), CollectiveError>;

    /// Hands `buffer` to rank `to`, which must [`recv`](Self::recv) it.
    ///
    /// The call may last until it is received: two ranks that first send to each other wait forever, so to
    /// the timeout.
    ///
    /// # Errors
    ///
    /// [`CollectiveError::WrongRank`] if `to` is not another rank of this group.
    fn send(&self, buffer: Buffer<'_>, to: usize) -> Result<(), CollectiveError>;

    /// Takes from rank `from` what it [`send`](Self::send)s.
    ///
    /// # Errors
    ///
    /// [`CollectiveError::WrongRank`] if `from` is not another rank of this group.
    fn recv(&self, buffer: BufferMut<'_>, from: usize) -> Result<(), CollectiveError>;

    /// Breaks the group for everyone at once: calls that wait and all later ones fail with `reason`.
    ///
    /// Never waits. If the group is broken already, the first cause stays.
    fn abort(&self, reason: &str);
}
