//! Ranks that are threads of one process and read each other's memory.

mod bell;
mod deposit;
mod group;
mod round;
mod steps;
mod verdict;

use std::{
    any::Any,
    fmt,
    num::NonZeroUsize,
    ops::DerefMut,
    sync::{Arc, Mutex, PoisonError},
    thread,
    time::Duration,
};

use deposit::{Deposit, Handed};
use group::{Group, Progress};
use round::Step;

use crate::{Buffer, BufferMut, Collective, CollectiveError, Communicator, DType, ReduceOp, call::Call};

/// One rank of a group whose ranks are threads of this process.
///
/// Dropping it tells the others that this rank has ended: the first call that needs it fails at once and breaks
/// the group. Dropping it in a panic breaks the group there and then.
///
/// A rank makes one call at a time: calls from several threads on one communicator queue up.
pub struct ThreadCommunicator {
    rank: usize,
    group: Arc<Group>,
    progress: Mutex<Progress>,
}

impl ThreadCommunicator {
    /// The communicators of a new group, by rank; every wait in it ends within `timeout`.
    #[must_use]
    pub fn group(world_size: NonZeroUsize, timeout: Duration) -> Vec<Self> {
        let group = Arc::new(Group::new(world_size, timeout));
        let communicator = |rank| Self { rank, group: group.clone(), progress: Mutex::new(Progress::default()) };
        (0..world_size.get()).map(communicator).collect()
    }

    /// Reduces a list of owned buffers over all ranks, in one collective and without a copy: every rank
    /// gets the same buffers, those that were rank 0's.
    ///
    /// Each rank reduces its share of the bytes. `dtypes` says what the buffers hold. The buffers of other
    /// ranks are dropped, each on its own rank, before the call returns. Counts as
    /// [`Collective::AllReduce`].
    ///
    /// # Errors
    ///
    /// Those of [`Communicator::all_reduce_many`]; [`CollectiveError::WrongLength`] if there are not as many
    /// dtypes as buffers, [`CollectiveError::PartialElement`] if a buffer is not a whole number of elements.
    pub fn all_reduce_shared<S>(
        &self,
        buffers: Vec<S>,
        dtypes: &[DType],
        op: ReduceOp,
    ) -> Result<Vec<Arc<S>>, CollectiveError>
    where
        S: DerefMut<Target = [u8]> + Send + Sync + 'static,
    {
        let call = self.call(Collective::AllReduce);
        self.check(
            call.check_length("dtypes (one a buffer)", dtypes.len(), buffers.len())
                .and_then(|()| call.check_reducible(op, dtypes.iter().copied())),
        )?;
        let mut result = Vec::with_capacity(buffers.len());
        let mut shared: Vec<Arc<S>> = buffers.into_iter().map(Arc::new).collect();
        // From here to the end of the round the list is reached through this pointer alone: ranks clone
        // its `Arc`s through it after the last write to the bytes, which `outputs` borrows from them.
        let list = &raw mut shared;
        // SAFETY: a pointer to a local that outlives the reference, and nothing else uses it meanwhile.
        let outputs = views(unsafe { &mut *list }, dtypes);
        let outputs = self.check(outputs)?;
        let handed = Handed::new("shared buffers", list.cast_const(), &mut result);
        let deposit = Deposit { op: Some(op), outputs: &outputs, handed: Some(handed), ..Deposit::of(call.collective) };
        self.run(&deposit, &[steps::reduce_to_first, steps::collect_first::<S>])?;
        Ok(result)
    }

    /// Gives every rank a pointer to every rank's `value`, by rank.
    ///
    /// `name` says what it is and must be equal on all ranks; `num_bytes` is what a
    /// [`Counting`](crate::Counting) communicator counts. Counts as [`Collective::Exchange`].
    ///
    /// # Errors
    ///
    /// Those of every collective; another name or type is a [`CollectiveError::Mismatch`].
    pub fn exchange<T: Any + Send + Sync>(
        &self,
        name: &'static str,
        num_bytes: usize,
        value: Arc<T>,
    ) -> Result<Vec<Arc<T>>, CollectiveError> {
        tracing::trace!(name, num_bytes, rank = self.rank, "exchange");
        let mut result = Vec::with_capacity(self.world_size());
        let handed = Handed::new(name, &raw const value, &mut result);
        let deposit = Deposit { handed: Some(handed), ..Deposit::of(Collective::Exchange) };
        self.run(&deposit, &[steps::collect_values::<T>])?;
        Ok(result)
    }

    /// What broke the group, if it is broken.
    #[must_use]
    pub fn first_cause(&self) -> Option<CollectiveError> {
        self.group.first_cause().map(Arc::unwrap_or_clone)
    }

    /// [`first_cause`](Self::first_cause), to ask when this rank has ended.
    pub(crate) fn watch(&self) -> impl Fn() -> Option<CollectiveError> + use<> {
        let group = self.group.clone();
        move || group.first_cause().map(Arc::unwrap_or_clone)
    }

    fn call(&self, collective: Collective) -> Call {
        Call { rank: self.rank, world_size: self.group.world_size(), collective }
    }

    /// Breaks the group if this rank's arguments are wrong: the others wait for a call that will not come.
    fn check<T>(&self, arguments: Result<T, CollectiveError>) -> Result<T, CollectiveError> {
        arguments.inspect_err(|error| self.break_off(error.clone()))
    }

    fn break_off(&self, cause: CollectiveError) {
        let text = cause.to_string();
        if self.group.break_off(cause) {
            tracing::error!(error = text, "process group broken");
        }
    }

    fn run(&self, deposit: &Deposit<'_>, steps: &[Step]) -> Result<(), CollectiveError> {
        let mut progress = self.progress.lock().unwrap_or_else(PoisonError::into_inner);
        self.group.run(self.call(deposit.collective), &mut progress, deposit, steps)
    }
}

impl Communicator for ThreadCommunicator {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.group.world_size()
    }

    fn timeout(&self) -> Duration {
        self.group.timeout()
    }

    fn all_reduce_many(&self, buffers: &mut [BufferMut<'_>], op: ReduceOp) -> Result<(), CollectiveError> {
        let call = self.call(Collective::AllReduce);
        self.check(call.check_reducible(op, buffers.iter().map(BufferMut::dtype)))?;
        let deposit = Deposit { op: Some(op), outputs: buffers, ..Deposit::of(call.collective) };
        self.run(&deposit, &[steps::reduce_to_all])
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
        let deposit =
            Deposit { op: Some(op), lengths, inputs: &[input], outputs: &[output], ..Deposit::of(call.collective) };
        self.run(&deposit, &[steps::reduce_segment])
    }

    fn all_gather(&self, input: Buffer<'_>, lengths: &[usize], output: BufferMut<'_>) -> Result<(), CollectiveError> {
        let call = self.call(Collective::AllGather);
        let whole = ("output (elements)", output.num_elements());
        let own = ("input (elements)", input.num_elements());
        self.check(call.check_one_dtype(input, &output).and_then(|()| call.check_segments(lengths, whole, own)))?;
        let deposit = Deposit { lengths, inputs: &[input], outputs: &[output], ..Deposit::of(call.collective) };
        self.run(&deposit, &[steps::gather])
    }

    fn broadcast(&self, buffer: BufferMut<'_>, root: usize) -> Result<(), CollectiveError> {
        let call = self.call(Collective::Broadcast);
        self.check(call.check_rank("root", root))?;
        let deposit = Deposit { other: Some(root), outputs: &[buffer], ..Deposit::of(call.collective) };
        self.run(&deposit, &[steps::copy_from_root])
    }

    fn barrier(&self) -> Result<(), CollectiveError> {
        self.run(&Deposit::of(Collective::Barrier), &[])
    }

    fn send(&self, buffer: Buffer<'_>, to: usize) -> Result<(), CollectiveError> {
        let call = self.call(Collective::Send);
        self.check(call.check_rank("to", to))?;
        let deposit = Deposit { other: Some(to), inputs: &[buffer], ..Deposit::of(call.collective) };
        self.run(&deposit, &[steps::transfer])
    }

    fn recv(&self, buffer: BufferMut<'_>, from: usize) -> Result<(), CollectiveError> {
        let call = self.call(Collective::Recv);
        self.check(call.check_rank("from", from))?;
        let deposit = Deposit { other: Some(from), outputs: &[buffer], ..Deposit::of(call.collective) };
        self.run(&deposit, &[steps::transfer])
    }

    fn abort(&self, reason: &str) {
        let (rank, world_size) = (self.rank, self.world_size());
        self.break_off(CollectiveError::Aborted { rank, world_size, reason: reason.to_owned() });
    }
}

impl Drop for ThreadCommunicator {
    fn drop(&mut self) {
        let num_calls = self.progress.get_mut().unwrap_or_else(PoisonError::into_inner).num_calls;
        if thread::panicking() {
            let (rank, world_size) = (self.rank, self.group.world_size());
            self.group.break_off(CollectiveError::RankEnded { rank, world_size, num_calls, panicked: true });
        } else {
            self.group.end(self.rank, num_calls);
        }
    }
}

impl fmt::Debug for ThreadCommunicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ThreadCommunicator(rank {} of {})", self.rank, self.group.world_size())
    }
}

/// The bytes of owned buffers, as what they hold.
fn views<'a, S>(buffers: &'a mut [Arc<S>], dtypes: &[DType]) -> Result<Vec<BufferMut<'a>>, CollectiveError>
where
    S: DerefMut<Target = [u8]>,
{
    let view = |(buffer, &dtype): (&'a mut Arc<S>, _)| {
        BufferMut::new(dtype, Arc::get_mut(buffer).expect("no other rank has a pointer yet"))
    };
    buffers.iter_mut().zip(dtypes).map(view).collect()
}
