//! How bytes go from rank to rank: what a communicator needs of a network.

use core::ops::ControlFlow;
use std::time::Instant;

use crate::{BufferMut, DType, ReduceOp};

/// One rank's connection to all others: whole messages between host buffers, and short notices beside them.
///
/// Between two ranks messages arrive in the order in which they were sent. They are given in lists that progress
/// together, so no order of ranks can deadlock. A notice needs nobody who waits for it; it never overtakes an earlier
/// notice, but may overtake messages.
///
/// Dropping it tells the others, who still get what was sent before.
pub trait Transport: Send + Sync {
    /// This rank, below [`world_size`](Self::world_size).
    fn rank(&self) -> usize;

    /// The number of ranks.
    fn world_size(&self) -> usize;

    /// Sends and receives all messages of two lists, in list order for each other rank, and comes back when all are done.
    ///
    /// By then it has taken in all notices that had arrived when it was called, and shown them to `watch`, as those that
    /// arrive meanwhile. One thread calls this at a time. After an error it must not be called again: messages may have been cut.
    ///
    /// # Errors
    ///
    /// - [`TransportError::Late`] if not all is done by `deadline`,
    /// - [`TransportError::Stopped`] if `watch` asks for it,
    /// - [`TransportError::Ended`] if a rank of the lists has ended,
    /// - [`TransportError::TooLong`] if a message is longer than its buffer,
    /// - [`TransportError::Failed`] for what else can go wrong.
    fn exchange(
        &self,
        outgoing: &mut [Outgoing<'_>],
        incoming: &mut [Incoming<'_>],
        deadline: Instant,
        watch: &mut dyn Watch,
    ) -> Result<(), TransportError>;

    /// Sends a notice of at most [`MAX_NOTICE_BYTES`]: without waiting, from any thread, and without saying whether it arrives.
    fn notify(&self, to: usize, notice: &[u8]);

    /// Whether [`all_reduce`](Self::all_reduce) is to be used for this; the same on all ranks.
    fn reduces(&self, dtype: DType, op: ReduceOp) -> bool {
        let _ = (dtype, op);
        false
    }

    /// Reduces a buffer over all ranks by the network's own means, in whatever order it likes.
    ///
    /// Called only where [`reduces`](Self::reduces) says so, when all ranks have come with equal buffers.
    ///
    /// # Errors
    ///
    /// As [`exchange`](Self::exchange).
    fn all_reduce(
        &self,
        buffer: &mut BufferMut<'_>,
        op: ReduceOp,
        deadline: Instant,
        watch: &mut dyn Watch,
    ) -> Result<(), TransportError> {
        let _ = (buffer, op, deadline, watch);
        let reason = "this transport does not reduce".into();
        Err(TransportError::Failed { rank: self.rank(), reason })
    }
}

/// The longest notice, in bytes.
pub const MAX_NOTICE_BYTES: usize = 8 * 1024;

/// What a rank looks at while it waits for messages.
pub trait Watch {
    /// A notice has arrived.
    fn notice(&mut self, from: usize, notice: &[u8]) -> ControlFlow<()>;

    /// A message of the list has arrived; others may still be on their way.
    fn arrived(&mut self, from: usize, message: &[u8]);

    /// Some milliseconds have passed.
    fn tick(&mut self) -> ControlFlow<()>;
}

/// A message to send.
#[derive(Debug)]
pub struct Outgoing<'a> {
    /// Another rank.
    pub to: usize,
    /// The message, which may be empty.
    pub bytes: &'a [u8],
    /// For the transport: bytes that are on their way.
    pub num_sent: usize,
    /// For the transport: whether the buffer is free again.
    pub is_sent: bool,
}

/// Room for a message to receive.
#[derive(Debug)]
pub struct Incoming<'a> {
    /// Another rank.
    pub from: usize,
    /// Where it goes; a message may be shorter.
    pub bytes: &'a mut [u8],
    /// For the transport: bytes that have arrived; in the end, the length of the message.
    pub num_received: usize,
    /// For the transport: whether the message is complete.
    pub is_received: bool,
}

impl<'a> Outgoing<'a> {
    /// A message that is still to be sent.
    #[must_use]
    pub const fn new(to: usize, bytes: &'a [u8]) -> Self {
        Self { to, bytes, num_sent: 0, is_sent: false }
    }
}

impl<'a> Incoming<'a> {
    /// Room for a message that is still to come.
    #[must_use]
    pub const fn new(from: usize, bytes: &'a mut [u8]) -> Self {
        Self { from, bytes, num_received: 0, is_received: false }
    }
}

/// Why messages were not exchanged.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TransportError {
    /// The deadline has passed.
    #[error("not all messages came in time")]
    Late,
    /// The watch asked for it.
    #[error("stopped by a notice")]
    Stopped,
    /// A rank has ended, and what it sent before has been received.
    #[error("rank {rank} has ended")]
    Ended {
        /// That rank.
        rank: usize,
    },
    /// A message is longer than its buffer.
    #[error("rank {rank} sent a message of {num_bytes} bytes where at most {max} were expected")]
    TooLong {
        /// The sender.
        rank: usize,
        /// The length of its message.
        num_bytes: u64,
        /// The length of the buffer.
        max: usize,
    },
    /// A connection failed.
    #[error("the connection to rank {rank} failed: {reason}")]
    Failed {
        /// The other end.
        rank: usize,
        /// What the system says.
        reason: String,
    },
}
