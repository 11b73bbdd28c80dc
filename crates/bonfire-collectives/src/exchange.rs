//! Ranks that share no memory: collectives over any [`Transport`].
//!
//! ```text
//! meet: headers (and small data) to and from all -> compare -> work: chunks to and from all, reduced in rank order
//!            |                                         |          |
//!   Timeout, RankEnded, Aborted                     Mismatch    the same: a rank may be lost in the middle
//! ```
//!
//! Whoever finds the group broken tells all others in a notice, so that nobody waits for the timeout.

mod attention;
mod header;
mod list;
mod notice;
mod plan;
mod round;
mod work;

use std::{
    fmt,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use header::Terms;
use notice::{Link, Notice};
use round::Round;

use crate::{
    Buffer, BufferMut, Collective, CollectiveError, Communicator, ReduceOp, Transport, broken::Break, call::Call,
};

/// One rank of a group whose ranks exchange messages over `T`.
///
/// Every call first exchanges a header with all ranks, or with the other rank of a transfer, and small data with it; so a
/// mismatch is named on every rank before a buffer is touched. An error after that, when a rank is lost in the middle of
/// large data, leaves the buffers in no particular state.
///
/// Dropping it tells the others that this rank has ended: the first call that needs it fails at once and breaks the group.
/// Dropping it in a panic breaks the group there and then.
///
/// A rank makes one call at a time: calls from several threads on one communicator queue up.
pub struct ExchangeCommunicator<T: Transport> {
    transport: T,
    timeout: Duration,
    state: State,
    progress: Mutex<Progress>,
}

/// Why the group is broken, for every thread of this rank.
#[derive(Default)]
struct State {
    broken: Mutex<Option<Break>>,
    /// Mirrors whether `broken` is set.
    is_broken: AtomicBool,
}

/// What the thread that makes a call has to itself.
struct Progress {
    num_calls: u64,
    others: Vec<Other>,
    /// Ranks that wait for each other, the last one for this rank.
    chains: Vec<Vec<Link>>,
    memory: round::Memory,
}

/// What is known of another rank.
#[derive(Clone, Copy, Default)]
struct Other {
    /// Its calls, as its last header said.
    num_calls: u64,
    /// Whether it ended, and if so, in a panic.
    ended: Option<bool>,
}

impl<T: Transport> ExchangeCommunicator<T> {
    /// This rank's end of a new group; every wait in it ends within `timeout`.
    #[must_use]
    pub fn new(transport: T, timeout: Duration) -> Self {
        let progress = Progress {
            num_calls: 0,
            others: vec![Other::default(); transport.world_size()],
            chains: Vec::new(),
            memory: round::Memory::new(transport.world_size()),
        };
        Self { transport, timeout, state: State::default(), progress: Mutex::new(progress) }
    }

    /// What broke the group, as far as this rank has learnt.
    #[must_use]
    pub fn first_cause(&self) -> Option<CollectiveError> {
        self.state.lock().as_ref().map(|broken| CollectiveError::clone(&broken.cause))
    }

    fn call(&self, collective: Collective) -> Call {
        Call { rank: self.transport.rank(), world_size: self.transport.world_size(), collective }
    }

    /// Breaks the group if this rank's arguments are wrong: the others wait for a call that will not come.
    fn check<V>(&self, arguments: Result<V, CollectiveError>) -> Result<V, CollectiveError> {
        arguments.inspect_err(|error| {
            self.break_off(Break { cause: Arc::new(error.clone()), concerned: Vec::new() });
        })
    }

    /// Breaks the group for everyone, unless it is broken; gives the first cause.
    fn break_off(&self, broken: Break) -> Break {
        if !self.state.set(&broken) {
            return self.state.lock().clone().unwrap_or(broken);
        }
        tracing::error!(error = %broken.cause, rank = self.transport.rank(), "process group broken");
        self.notify_all(&Notice::Broken(broken.clone()));
        broken
    }

    fn notify_all(&self, notice: &Notice) {
        let (rank, bytes) = (self.transport.rank(), notice.encode());
        (0..self.transport.world_size()).filter(|&to| to != rank).for_each(|to| self.transport.notify(to, &bytes));
    }

    /// Starts a call, unless the group is broken.
    fn start(&self, collective: Collective) -> Result<Round<'_, T>, CollectiveError> {
        let call = self.call(collective);
        let mut progress = self.progress.lock().unwrap_or_else(PoisonError::into_inner);
        progress.num_calls += 1;
        match self.state.lock().as_ref() {
            Some(broken) => Err(broken.refuse(call)),
            None => Ok(Round::new(self, call, progress)),
        }
    }
}

impl State {
    /// Sets the first cause; says whether it is this one.
    fn set(&self, broken: &Break) -> bool {
        let mut state = self.lock();
        let is_first = state.is_none();
        if is_first {
            *state = Some(broken.clone());
            self.is_broken.store(true, Ordering::Release);
        }
        is_first
    }

    fn is_broken(&self) -> bool {
        self.is_broken.load(Ordering::Acquire)
    }

    fn lock(&self) -> MutexGuard<'_, Option<Break>> {
        self.broken.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T: Transport> Communicator for ExchangeCommunicator<T> {
    fn rank(&self) -> usize {
        self.transport.rank()
    }

    fn world_size(&self) -> usize {
        self.transport.world_size()
    }

    fn timeout(&self) -> Duration {
        self.timeout
    }

    fn all_reduce_many(&self, buffers: &mut [BufferMut<'_>], op: ReduceOp) -> Result<(), CollectiveError> {
        let call = self.call(Collective::AllReduce);
        self.check(call.check_reducible(op, buffers.iter().map(BufferMut::dtype)))?;
        let shapes = buffers.iter().map(|buffer| (buffer.dtype(), buffer.num_elements())).collect();
        let terms = Terms { op: Some(op), shapes, ..Terms::of(call.collective) };
        work::all_reduce(&mut self.start(call.collective)?, &terms, buffers, op)
    }

    fn reduce_scatter(
        &self,
        input: Buffer<'_>,
        lengths: &[usize],
        output: BufferMut<'_>,
        op: ReduceOp,
    ) -> Result<(), CollectiveError> {
        let call = self.call(Collective::ReduceScatter);
        let whole = ("input (elements)", input.num_elements());
        let own = ("output (elements)", output.num_elements());
        self.check(
            call.check_reducible(op, [input.dtype()])
                .and_then(|()| call.check_one_dtype(input, &output))
                .and_then(|()| call.check_segments(lengths, whole, own)),
        )?;
        let shapes = vec![(input.dtype(), input.num_elements())];
        let terms = Terms { op: Some(op), lengths, shapes, ..Terms::of(call.collective) };
        work::reduce_scatter(&mut self.start(call.collective)?, &terms, input, output, op)
    }

    fn all_gather(&self, input: Buffer<'_>, lengths: &[usize], output: BufferMut<'_>) -> Result<(), CollectiveError> {
        let call = self.call(Collective::AllGather);
        let whole = ("output (elements)", output.num_elements());
        let own = ("input (elements)", input.num_elements());
        self.check(call.check_one_dtype(input, &output).and_then(|()| call.check_segments(lengths, whole, own)))?;
        let shapes = vec![(output.dtype(), output.num_elements())];
        let terms = Terms { lengths, shapes, ..Terms::of(call.collective) };
        work::all_gather(&mut self.start(call.collective)?, &terms, input, output)
    }

    fn broadcast(&self, buffer: BufferMut<'_>, root: usize) -> Result<(), CollectiveError> {
        let call = self.call(Collective::Broadcast);
        self.check(call.check_rank("root", root))?;
        let shapes = vec![(buffer.dtype(), buffer.num_elements())];
        let terms = Terms { other: Some(root), shapes, ..Terms::of(call.collective) };
        work::broadcast(&mut self.start(call.collective)?, &terms, buffer, root)
    }

    fn barrier(&self) -> Result<(), CollectiveError> {
        self.start(Collective::Barrier)?.meet(&Terms::of(Collective::Barrier), |_, _| {})
    }

    fn send(&self, buffer: Buffer<'_>, to: usize) -> Result<(), CollectiveError> {
        let call = self.call(Collective::Send);
        self.check(call.check_rank("to", to))?;
        let shapes = vec![(buffer.dtype(), buffer.num_elements())];
        let terms = Terms { other: Some(to), shapes, ..Terms::of(call.collective) };
        work::send(&mut self.start(call.collective)?, &terms, buffer, to)
    }

    fn recv(&self, buffer: BufferMut<'_>, from: usize) -> Result<(), CollectiveError> {
        let call = self.call(Collective::Recv);
        self.check(call.check_rank("from", from))?;
        let shapes = vec![(buffer.dtype(), buffer.num_elements())];
        let terms = Terms { other: Some(from), shapes, ..Terms::of(call.collective) };
        work::recv(&mut self.start(call.collective)?, &terms, buffer, from)
    }

    fn abort(&self, reason: &str) {
        let (rank, world_size) = (self.rank(), self.world_size());
        let cause = CollectiveError::Aborted { rank, world_size, reason: reason.to_owned() };
        self.break_off(Break { cause: Arc::new(cause), concerned: Vec::new() });
    }
}

impl<T: Transport> Drop for ExchangeCommunicator<T> {
    fn drop(&mut self) {
        let num_calls = self.progress.get_mut().unwrap_or_else(PoisonError::into_inner).num_calls;
        // Others may hear of the end of this rank before they hear of what broke the group.
        if let Some(broken) = self.state.lock().clone() {
            self.notify_all(&Notice::Broken(broken));
        }
        self.notify_all(&Notice::Ended { num_calls, panicked: thread::panicking() });
    }
}

impl<T: Transport> fmt::Debug for ExchangeCommunicator<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ExchangeCommunicator(rank {} of {})", self.transport.rank(), self.transport.world_size())
    }
}
