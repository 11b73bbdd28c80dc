//! A communicator that counts, so that a test can assert "one all_reduce, nothing else".

use core::{
    any::Any,
    fmt,
    ops::{DerefMut, Sub},
};
use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use crate::{Buffer, BufferMut, Collective, CollectiveError, Communicator, DType, ReduceOp, ThreadCommunicator};

/// Counts the calls that go through it, as this rank makes them and whether they succeed or not.
#[derive(Debug)]
pub struct Counting<C> {
    inner: C,
    counts: Arc<Counts>,
}

/// Running counts of calls and bytes, for each [`Collective`].
///
/// Bytes are those of the larger side of a call on its rank: the whole list of an all_reduce, the input of a
/// reduce_scatter, the output of an all_gather.
#[derive(Debug, Default)]
pub struct Counts {
    num_calls: [AtomicU64; Collective::ALL.len()],
    num_bytes: [AtomicU64; Collective::ALL.len()],
}

/// The counts at one moment, or between two.
///
/// Displays as `1 all_reduce (4096 bytes), 2 barrier (0 bytes)`, or `nothing`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Tally {
    num_calls: [u64; Collective::ALL.len()],
    num_bytes: [u64; Collective::ALL.len()],
}

impl<C> Counting<C> {
    /// Counts from zero.
    pub fn new(inner: C) -> Self {
        Self::with_counts(inner, Arc::default())
    }

    /// Adds to `counts`, which several communicators may share.
    pub const fn with_counts(inner: C, counts: Arc<Counts>) -> Self {
        Self { inner, counts }
    }

    /// The counts, to look at while or after the communicator is used.
    #[must_use]
    pub fn counts(&self) -> Arc<Counts> {
        self.counts.clone()
    }

    /// The communicator that does the work.
    pub const fn inner(&self) -> &C {
        &self.inner
    }
}

impl Counts {
    /// The counts now.
    #[must_use]
    pub fn tally(&self) -> Tally {
        let load = |counts: &[AtomicU64; Collective::ALL.len()]| {
            core::array::from_fn(|index| counts[index].load(Ordering::Relaxed))
        };
        Tally { num_calls: load(&self.num_calls), num_bytes: load(&self.num_bytes) }
    }

    /// Starts again from zero; gives what was counted.
    pub fn reset(&self) -> Tally {
        let take = |counts: &[AtomicU64; Collective::ALL.len()]| {
            core::array::from_fn(|index| counts[index].swap(0, Ordering::Relaxed))
        };
        Tally { num_calls: take(&self.num_calls), num_bytes: take(&self.num_bytes) }
    }

    fn count(&self, collective: Collective, num_bytes: usize) {
        self.num_calls[collective as usize].fetch_add(1, Ordering::Relaxed);
        self.num_bytes[collective as usize].fetch_add(num_bytes as u64, Ordering::Relaxed);
    }
}

impl Tally {
    /// The calls of one collective.
    #[must_use]
    pub const fn num_calls(&self, collective: Collective) -> u64 {
        self.num_calls[collective as usize]
    }

    /// The bytes of one collective.
    #[must_use]
    pub const fn num_bytes(&self, collective: Collective) -> u64 {
        self.num_bytes[collective as usize]
    }

    /// The calls of all collectives.
    #[must_use]
    pub fn total_calls(&self) -> u64 {
        self.num_calls.iter().sum()
    }
}

/// What was counted since an earlier tally of the same, not reset, counts.
impl Sub for Tally {
    type Output = Self;

    fn sub(self, earlier: Self) -> Self {
        let since = |now: [u64; Collective::ALL.len()], then: [u64; Collective::ALL.len()]| {
            core::array::from_fn(|index| now[index].saturating_sub(then[index]))
        };
        Self {
            num_calls: since(self.num_calls, earlier.num_calls),
            num_bytes: since(self.num_bytes, earlier.num_bytes),
        }
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.total_calls() == 0 {
            return f.write_str("nothing");
        }
        let called = Collective::ALL.into_iter().filter(|&collective| self.num_calls(collective) > 0);
        for (index, collective) in called.enumerate() {
            let separator = if index == 0 { "" } else { ", " };
            let (num_calls, num_bytes) = (self.num_calls(collective), self.num_bytes(collective));
            write!(f, "{separator}{num_calls} {collective} ({num_bytes} bytes)")?;
        }
        Ok(())
    }
}

impl Counting<ThreadCommunicator> {
    /// Counts and does [`ThreadCommunicator::all_reduce_shared`].
    ///
    /// # Errors
    ///
    /// Those of the communicator.
    pub fn all_reduce_shared<S>(
        &self,
        buffers: Vec<S>,
        dtypes: &[DType],
        op: ReduceOp,
    ) -> Result<Vec<Arc<S>>, CollectiveError>
    where
        S: DerefMut<Target = [u8]> + Send + Sync + 'static,
    {
        self.counts.count(Collective::AllReduce, buffers.iter().map(|buffer| buffer.len()).sum());
        self.inner.all_reduce_shared(buffers, dtypes, op)
    }

    /// Counts and does [`ThreadCommunicator::exchange`].
    ///
    /// # Errors
    ///
    /// Those of the communicator.
    pub fn exchange<T: Any + Send + Sync>(
        &self,
        name: &'static str,
        num_bytes: usize,
        value: Arc<T>,
    ) -> Result<Vec<Arc<T>>, CollectiveError> {
        self.counts.count(Collective::Exchange, num_bytes);
        self.inner.exchange(name, num_bytes, value)
    }
}

impl<C: Communicator> Communicator for Counting<C> {
    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn world_size(&self) -> usize {
        self.inner.world_size()
    }

    fn timeout(&self) -> Duration {
        self.inner.timeout()
    }

    fn all_reduce_many(&self, buffers: &mut [BufferMut<'_>], op: ReduceOp) -> Result<(), CollectiveError> {
        self.counts.count(Collective::AllReduce, buffers.iter().map(BufferMut::num_bytes).sum());
        self.inner.all_reduce_many(buffers, op)
    }

    fn reduce_scatter(
        &self,
        input: Buffer<'_>,
        lengths: &[usize],
        output: BufferMut<'_>,
        op: ReduceOp,
    ) -> Result<(), CollectiveError> {
        self.counts.count(Collective::ReduceScatter, input.num_bytes());
        self.inner.reduce_scatter(input, lengths, output, op)
    }

    fn all_gather(&self, input: Buffer<'_>, lengths: &[usize], output: BufferMut<'_>) -> Result<(), CollectiveError> {
        self.counts.count(Collective::AllGather, output.num_bytes());
        self.inner.all_gather(input, lengths, output)
    }

    fn broadcast(&self, buffer: BufferMut<'_>, root: usize) -> Result<(), CollectiveError> {
        self.counts.count(Collective::Broadcast, buffer.num_bytes());
        self.inner.broadcast(buffer, root)
    }

    fn barrier(&self) -> Result<(), CollectiveError> {
        self.counts.count(Collective::Barrier, 0);
        self.inner.barrier()
    }

    fn send(&self, buffer: Buffer<'_>, to: usize) -> Result<(), CollectiveError> {
        self.counts.count(Collective::Send, buffer.num_bytes());
        self.inner.send(buffer, to)
    }

    fn recv(&self, buffer: BufferMut<'_>, from: usize) -> Result<(), CollectiveError> {
        self.counts.count(Collective::Recv, buffer.num_bytes());
        self.inner.recv(buffer, from)
    }

    fn abort(&self, reason: &str) {
        self.inner.abort(reason);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_order_of_all_collectives_is_that_of_their_counts() {
        for (index, collective) in Collective::ALL.into_iter().enumerate() {
            assert_eq!(collective as usize, index);
        }
    }

    #[test]
    fn a_difference_of_tallies_is_what_came_between() {
        let counts = Counts::default();
        counts.count(Collective::Barrier, 0);
        let before = counts.tally();
        counts.count(Collective::AllReduce, 8);
        let since = counts.tally() - before;
        assert_eq!(since.to_string(), "1 all_reduce (8 bytes)");
        assert_eq!((since.total_calls(), since.num_bytes(Collective::AllReduce)), (1, 8));
        assert_eq!(counts.reset().to_string(), "1 all_reduce (8 bytes), 1 barrier (0 bytes)");
        assert_eq!(counts.tally().to_string(), "nothing");
    }
}
