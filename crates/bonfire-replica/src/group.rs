//! The members of one device: a thread each, a bounded queue each, one order for all of them.

use std::{
    any::Any,
    collections::HashMap,
    num::NonZeroUsize,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use bonfire_collectives::{CollectiveError, Communicator, Counting, Counts, ThreadCommunicator};
use burn_backend::DType;
use crossbeam_channel::{Receiver, RecvTimeoutError, SendTimeoutError, Sender, TrySendError, bounded};

use crate::{
    Member, RandomState, ReplicaError, ReplicaOptions, allocator,
    balance::{Balancer, Cost, Meter},
    member::MemberCommunicator,
    memory::{MemberAccount, Memory},
    pending::PendingSums,
};

/// Something every member does once, in the same place of its queue.
pub(crate) trait Task<B: Member>: Send + Sync {
    /// Named in errors.
    fn operation(&self) -> &'static str;
    /// This member's part.
    fn run(&self, member: &MemberContext<B>) -> Result<(), CollectiveError>;
    /// Bytes that the task carries from the home device to each member.
    fn carried_bytes(&self) -> usize {
        0
    }
    /// What its time on `rank` depends on. Asked only where that is measured.
    fn cost(&self, _rank: usize) -> Cost {
        Cost::Unmeasured
    }
}

/// What a task sees of the member that runs it.
pub(crate) struct MemberContext<B: Member> {
    pub(crate) rank: usize,
    pub(crate) device: B::Device,
    pub(crate) communicator: MemberCommunicator,
    pub(crate) account: MemberAccount,
    /// `None` where nothing is measured.
    pub(crate) meter: Option<Meter>,
}

/// N members that behave as one device. Kept alive by its devices and tensors; its threads end with it.
pub(crate) struct Group<B: Member> {
    /// Never used twice in a process for the same backend.
    pub(crate) index: u16,
    pub(crate) devices: Vec<B::Device>,
    pub(crate) options: ReplicaOptions,
    /// Multiply-adds from which an operation is worth sharing.
    pub(crate) min_work: usize,
    /// `None` for shares that never change.
    pub(crate) balancer: Option<Balancer>,
    queues: Vec<Sender<Arc<dyn Task<B>>>>,
    /// Whoever enqueues holds it, so that all members see all tasks in one order.
    order: Mutex<()>,
    state: Arc<GroupState>,
    counts: Arc<Counts>,
    /// Tasks enqueued so far, and how many of them the last `sync` saw.
    num_enqueued: AtomicU64,
    num_synced: AtomicU64,
    pub(crate) pending: PendingSums<B>,
    pub(crate) memory: Arc<Memory>,
    /// Of draws from counters.
    random: Mutex<RandomState>,
    /// Dtypes of indices, which the inner backend chooses itself, by operation and input.
    index_dtypes: Mutex<HashMap<(&'static str, DType), DType>>,
}

/// Beyond it the memory maps of threads run out before anything can be reported.
const MAX_MEMBERS: usize = 1024;

/// What the caller's side and the members' side both see.
struct GroupState {
    broken: OnceLock<ReplicaError>,
    progress: Vec<Progress>,
    queued_bytes: QueuedBytes,
}

#[derive(Default)]
struct Progress {
    num_done: AtomicU64,
    operation: Mutex<&'static str>,
}

#[derive(Default)]
struct QueuedBytes {
    bytes: AtomicUsize,
    waiting: Mutex<()>,
    freed: Condvar,
}

impl<B: Member> Group<B> {
    /// Starts one thread per device.
    ///
    /// # Errors
    ///
    /// [`ReplicaError::NoMembers`], [`ReplicaError::TooManyMembers`], [`ReplicaError::Shares`] and
    /// [`ReplicaError::Option`] for settings that cannot work, [`ReplicaError::Start`] if a thread cannot be started.
    pub(crate) fn start(index: u16, devices: Vec<B::Device>, options: ReplicaOptions) -> Result<Self, ReplicaError> {
        let num_members = NonZeroUsize::new(devices.len()).ok_or(ReplicaError::NoMembers)?;
        if num_members.get() > MAX_MEMBERS {
            return Err(ReplicaError::TooManyMembers { num_members: num_members.get(), limit: MAX_MEMBERS });
        }
        options.validate(num_members.get())?;
        if B::DEVICES_REPEAT {
            allocator::keep_freed_memory();
        }
        let num_threads = options.threads_per_member.unwrap_or_else(|| {
            let cores = thread::available_parallelism().map_or(1, usize::from);
            (cores / num_members).max(1)
        });

        let state = Arc::new(GroupState {
            broken: OnceLock::new(),
            progress: devices.iter().map(|_| Progress::default()).collect(),
            queued_bytes: QueuedBytes::default(),
        });
        let min_work = options.spread.min_work(num_members.get());
        let balancer = Balancer::new(&options, num_members.get());
        let memory = Memory::new(devices.len());
        let mut queues = Vec::with_capacity(devices.len());
        let mut counts = None;
        let communicators = ThreadCommunicator::group(num_members, options.timeout);
        for (rank, (device, communicator)) in devices.iter().cloned().zip(communicators).enumerate() {
            let (queue, tasks) = bounded(options.max_queued_ops);
            let communicator = Counting::new(communicator);
            counts.get_or_insert_with(|| communicator.counts());
            let meter = balancer.as_ref().and_then(|balancer| balancer.meter(rank));
            let worker = Worker {
                context: MemberContext {
                    rank,
                    device,
                    communicator,
                    account: MemberAccount::new(memory.clone(), rank),
                    meter,
                },
                tasks,
                state: state.clone(),
                num_threads,
            };
            thread::Builder::new().name(format!("bonfire-member-{rank}")).spawn(move || worker.run()).map_err(
                |error| ReplicaError::Start { member: rank, num_members: num_members.get(), reason: error.to_string() },
            )?;
            queues.push(queue);
        }
        tracing::debug!(num_members, num_threads, backend = B::name(&devices[0]), "replica group started");
        Ok(Self {
            index,
            devices,
            options,
            min_work,
            balancer,
            queues,
            order: Mutex::new(()),
            state,
            counts: counts.expect("at least one member"),
            num_enqueued: AtomicU64::new(0),
            num_synced: AtomicU64::new(0),
            pending: PendingSums::default(),
            memory,
            random: Mutex::default(),
            index_dtypes: Mutex::new(HashMap::new()),
        })
    }

    pub(crate) fn num_members(&self) -> usize {
        self.devices.len()
    }

    /// Whether any operation is worth sharing here.
    pub(crate) fn spreads(&self) -> bool {
        self.min_work < usize::MAX
    }

    /// The device on which tensors live before they are spread.
    pub(crate) fn home(&self) -> &B::Device {
        &self.devices[0]
    }

    /// Collectives that the first member has run; every member runs the same.
    pub(crate) fn counts(&self) -> &Counts {
        &self.counts
    }

    /// Where draws from counters have got to.
    pub(crate) fn random(&self) -> MutexGuard<'_, RandomState> {
        self.random.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Why the group can no longer be used, if so.
    pub(crate) fn broken(&self) -> Option<&ReplicaError> {
        self.state.broken.get()
    }

    /// Takes the right to enqueue.
    ///
    /// # Panics
    ///
    /// With the first cause, if the group is broken.
    pub(crate) fn order(&self) -> Order<'_, B> {
        self.try_order().unwrap_or_else(|cause| panic!("{cause}"))
    }

    /// As [`order`](Self::order).
    ///
    /// # Errors
    ///
    /// The first cause, if the group is broken.
    pub(crate) fn try_order(&self) -> Result<Order<'_, B>, ReplicaError> {
        // Whoever holds the order waits for full queues with a timeout, so this wait ends too.
        let guard = self.order.lock().unwrap_or_else(PoisonError::into_inner);
        match self.broken() {
            Some(cause) => Err(cause.clone()),
            None => Ok(Order { group: self, _guard: guard }),
        }
    }

    /// # Panics
    ///
    /// With the first cause, if the group is broken.
    #[inline]
    pub(crate) fn assert_whole(&self) {
        #[cold]
        fn broken(cause: &ReplicaError) -> ! {
            panic!("{cause}")
        }
        if let Some(cause) = self.broken() {
            broken(cause);
        }
    }

    /// Waits until each of `members` has sent its reply; gives the replies by rank, in rank order.
    ///
    /// # Errors
    ///
    /// The group's first cause, or [`ReplicaError::Timeout`] once no member has ended a task for the whole timeout.
    pub(crate) fn collect<T>(
        &self,
        replies: &Receiver<(usize, T)>,
        members: impl IntoIterator<Item = usize>,
    ) -> Result<Vec<(usize, T)>, ReplicaError> {
        let mut missing: Vec<usize> = members.into_iter().collect();
        let mut collected = Vec::with_capacity(missing.len());
        let mut patience = Patience::new(self);
        while let Some(&first) = missing.first() {
            match replies.recv_timeout(patience.interval()) {
                Ok((rank, reply)) => {
                    missing.retain(|&other| other != rank);
                    collected.push((rank, reply));
                }
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(self.broken().cloned().unwrap_or_else(|| ReplicaError::Panicked {
                        member: first,
                        num_members: self.num_members(),
                        operation: self.state.progress[first].operation(),
                        message: "its thread ended".into(),
                    }));
                }
                Err(RecvTimeoutError::Timeout) => patience.check()?,
            }
        }
        collected.sort_by_key(|(rank, _)| *rank);
        Ok(collected)
    }

    /// Whether tasks were enqueued that the last sync has not seen.
    pub(crate) fn needs_sync(&self) -> bool {
        self.num_enqueued.load(Ordering::Acquire) != self.num_synced.load(Ordering::Acquire)
    }

    /// Every member has run the first `num_enqueued` tasks, and one that synchronised it.
    pub(crate) fn synced(&self, num_enqueued: u64) {
        self.num_synced.fetch_max(num_enqueued, Ordering::AcqRel);
    }

    /// The dtype of an operation's indices, from `probe` the first time it is asked for.
    pub(crate) fn index_dtype(&self, operation: &'static str, input: DType, probe: impl FnOnce() -> DType) -> DType {
        let lock = || self.index_dtypes.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(dtype) = lock().get(&(operation, input)) {
            return *dtype;
        }
        let dtype = probe();
        lock().insert((operation, input), dtype);
        dtype
    }
}

/// How long a caller still waits: as long as some member gets on.
struct Patience<'a, B: Member> {
    group: &'a Group<B>,
    num_done: u64,
    since: Instant,
}

impl<'a, B: Member> Patience<'a, B> {
    fn new(group: &'a Group<B>) -> Self {
        Self { group, num_done: group.state.num_done(), since: Instant::now() }
    }

    /// How long to wait before the next look.
    fn interval(&self) -> Duration {
        const LOOK_EVERY: Duration = Duration::from_millis(100);
        self.group.options.timeout.min(LOOK_EVERY)
    }

    /// # Errors
    ///
    /// The group's first cause; or that nothing ended for the whole timeout, which then is the first cause.
    fn check(&mut self) -> Result<(), ReplicaError> {
        let state = &self.group.state;
        if let Some(cause) = state.broken.get() {
            return Err(cause.clone());
        }
        let num_done = state.num_done();
        if num_done != self.num_done {
            (self.num_done, self.since) = (num_done, Instant::now());
        } else if self.since.elapsed() >= self.group.options.timeout {
            // All members run the same tasks: the one that is furthest behind holds up the others.
            let progress = || state.progress.iter().enumerate();
            let behind = progress().min_by_key(|(_, progress)| progress.num_done.load(Ordering::Relaxed));
            let (member, progress) = behind.expect("at least one member");
            let timeout = ReplicaError::Timeout {
                member,
                num_members: self.group.num_members(),
                operation: progress.operation(),
                waited: self.since.elapsed(),
            };
            return Err(state.broken.get_or_init(|| timeout).clone());
        }
        Ok(())
    }
}

/// The right to enqueue tasks, held by one caller at a time.
pub(crate) struct Order<'a, B: Member> {
    pub(crate) group: &'a Group<B>,
    _guard: MutexGuard<'a, ()>,
}

impl<B: Member> Order<'_, B> {
    /// Puts one task into every member's queue; waits while a queue is full. A member that waits in a collective has
    /// its partners' tasks already queued, since each task goes to all members before the next one does. Gives the number
    /// of tasks enqueued so far.
    ///
    /// # Errors
    ///
    /// The first cause, if the group breaks while this waits, or if no member gets on for the whole timeout.
    pub(crate) fn try_enqueue(&self, task: Arc<dyn Task<B>>) -> Result<u64, ReplicaError> {
        let bytes = task.carried_bytes();
        if bytes > 0 {
            self.reserve(bytes * self.group.queues.len())?;
        }
        for queue in &self.group.queues {
            match queue.try_send(task.clone()) {
                Ok(()) => {}
                Err(TrySendError::Full(task)) => self.send(queue, task)?,
                Err(TrySendError::Disconnected(_)) => unreachable_queue(),
            }
        }
        Ok(self.group.num_enqueued.fetch_add(1, Ordering::AcqRel) + 1)
    }

    /// As [`try_enqueue`](Self::try_enqueue).
    ///
    /// # Panics
    ///
    /// Where that gives an error.
    pub(crate) fn enqueue(&self, task: Arc<dyn Task<B>>) {
        self.try_enqueue(task).unwrap_or_else(|cause| panic!("{cause}"));
    }

    /// Waits for room for `bytes` on their way to the members.
    fn reserve(&self, bytes: usize) -> Result<(), ReplicaError> {
        let mut patience = Patience::new(self.group);
        let limit = self.group.options.max_queued_bytes;
        while !self.group.state.queued_bytes.reserve(bytes, limit, patience.interval()) {
            patience.check()?;
        }
        Ok(())
    }

    /// Waits for room in a queue that is full.
    fn send(&self, queue: &Sender<Arc<dyn Task<B>>>, mut task: Arc<dyn Task<B>>) -> Result<(), ReplicaError> {
        let mut patience = Patience::new(self.group);
        while let Err(error) = queue.send_timeout(task, patience.interval()) {
            task = match error {
                SendTimeoutError::Timeout(task) => task,
                SendTimeoutError::Disconnected(_) => unreachable_queue(),
            };
            patience.check()?;
        }
        Ok(())
    }
}

fn unreachable_queue() -> ! {
    panic!("a member's thread ends with its queue, not before")
}

impl QueuedBytes {
    /// Whether there was room within `interval`. A task larger than the limit goes through alone.
    fn reserve(&self, bytes: usize, limit: usize, interval: Duration) -> bool {
        let is_full = |_: &mut ()| {
            let queued = self.bytes.load(Ordering::Acquire);
            queued > 0 && queued + bytes > limit
        };
        let guard = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        let (_guard, result) =
            self.freed.wait_timeout_while(guard, interval, is_full).unwrap_or_else(PoisonError::into_inner);
        let has_room = !result.timed_out();
        if has_room {
            self.bytes.fetch_add(bytes, Ordering::AcqRel);
        }
        has_room
    }

    fn free(&self, bytes: usize) {
        let guard = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        self.bytes.fetch_sub(bytes, Ordering::AcqRel);
        drop(guard);
        self.freed.notify_all();
    }
}

impl GroupState {
    /// Tasks that members have ended so far, all together.
    fn num_done(&self) -> u64 {
        self.progress.iter().map(|progress| progress.num_done.load(Ordering::Relaxed)).sum()
    }
}

impl Progress {
    fn operation(&self) -> &'static str {
        let operation = *self.operation.lock().unwrap_or_else(PoisonError::into_inner);
        if operation.is_empty() { "no operation" } else { operation }
    }

    fn begin(&self, operation: &'static str) {
        *self.operation.lock().unwrap_or_else(PoisonError::into_inner) = operation;
    }

    fn end(&self) {
        self.begin("");
        self.num_done.fetch_add(1, Ordering::Relaxed);
    }
}

struct Worker<B: Member> {
    context: MemberContext<B>,
    tasks: Receiver<Arc<dyn Task<B>>>,
    state: Arc<GroupState>,
    num_threads: usize,
}

impl<B: Member> Worker<B> {
    fn run(self) {
        // The member's own thread is the pool's first, so that its operations neither hop to another thread nor queue
        // behind another member's.
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(self.num_threads)
            .use_current_thread()
            .thread_name({
                let rank = self.context.rank;
                move |index| format!("bonfire-member-{rank}-{index}")
            })
            .build();
        if let Err(error) = &pool {
            self.break_group(ReplicaError::Start {
                member: self.context.rank,
                num_members: self.context.communicator.world_size(),
                reason: error.to_string(),
            });
        }
        for task in &self.tasks {
            // What a broken group still has queued is dropped unread: its inputs may be missing.
            let bytes = task.carried_bytes();
            self.run_task(task);
            if bytes > 0 {
                self.state.queued_bytes.free(bytes);
            }
        }
    }

    /// Runs the task, if the group is whole, and lets go of it: freeing the last tensors may fail as well.
    fn run_task(&self, task: Arc<dyn Task<B>>) {
        let progress = &self.state.progress[self.context.rank];
        let operation = task.operation();
        progress.begin(operation);
        if self.state.broken.get().is_none() {
            self.attempt(operation, || match &self.context.meter {
                None => task.run(&self.context),
                Some(meter) => meter.run(&*task, &self.context),
            });
        }
        self.context.account.end_task();
        // Only now, since the caller who waits for the task's reply must find the cause when the reply's channel ends.
        self.attempt(operation, || {
            drop(task);
            Ok(())
        });
        progress.end();
    }

    /// Breaks the group if `work` fails.
    fn attempt(&self, operation: &'static str, work: impl FnOnce() -> Result<(), CollectiveError>) {
        let (member, num_members) = (self.context.rank, self.context.communicator.world_size());
        match catch_unwind(AssertUnwindSafe(work)) {
            Ok(Ok(())) => {}
            Ok(Err(reason)) => {
                self.break_group(ReplicaError::Collective { member, num_members, operation, reason });
            }
            Err(panic) => self.break_group(ReplicaError::Panicked {
                member,
                num_members,
                operation,
                message: message_of(&*panic),
            }),
        }
    }

    /// Keeps the first cause and wakes the members that wait in a collective.
    fn break_group(&self, cause: ReplicaError) {
        let first = self.state.broken.get_or_init(|| cause);
        self.context.communicator.abort(&first.to_string());
    }
}

/// The text of a caught panic.
fn message_of(panic: &(dyn Any + Send)) -> String {
    panic
        .downcast_ref::<String>()
        .cloned()
        .or_else(|| panic.downcast_ref::<&str>().map(|text| text.to_string()))
        .unwrap_or_else(|| "a panic without a message".into())
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use burn_flex::{Flex, FlexDevice};

    use super::*;

    /// What each member does, by its rank.
    struct Act<F>(&'static str, F);

    impl<F: Fn(&MemberContext<Flex>) -> Result<(), CollectiveError> + Send + Sync> Task<Flex> for Act<F> {
        fn operation(&self) -> &'static str {
            self.0
        }

        fn run(&self, member: &MemberContext<Flex>) -> Result<(), CollectiveError> {
            (self.1)(member)
        }
    }

    fn group(num_members: usize, options: ReplicaOptions) -> Group<Flex> {
        Group::start(0, vec![FlexDevice; num_members], options).unwrap()
    }

    fn seconds(seconds: f64) -> Duration {
        Duration::from_secs_f64(seconds)
    }

    #[test]
    fn a_member_that_hangs_is_named_after_the_timeout() {
        let group = group(2, ReplicaOptions { timeout: seconds(0.3), ..Default::default() });
        let (release, held) = mpsc::channel::<()>();
        let held = Mutex::new(held);
        let (sender, receiver) = bounded(2);
        group.order().enqueue(Arc::new(Act("hang", move |member: &MemberContext<Flex>| {
            if member.rank == 1 {
                let _ = held.lock().unwrap().recv();
            }
            let _ = sender.send((member.rank, ()));
            Ok(())
        })));
        let error = group.collect(&receiver, 0..2).unwrap_err();
        assert!(matches!(error, ReplicaError::Timeout { member: 1, operation: "hang", .. }), "{error}");
        assert_eq!(group.try_order().err().unwrap().to_string(), error.to_string());
        drop(release);
    }

    #[test]
    fn a_slow_member_is_waited_for_as_long_as_it_gets_on() {
        let group = group(2, ReplicaOptions { timeout: seconds(0.4), ..Default::default() });
        for _ in 0..6 {
            group.order().enqueue(Arc::new(Act("slow", |member: &MemberContext<Flex>| {
                if member.rank == 0 {
                    thread::sleep(seconds(0.15));
                }
                Ok(())
            })));
        }
        let (sender, receiver) = bounded(2);
        group.order().enqueue(Arc::new(Act("reply", move |member: &MemberContext<Flex>| {
            let _ = sender.send((member.rank, ()));
            Ok(())
        })));
        assert_eq!(group.collect(&receiver, 0..2).unwrap().len(), 2);
    }

    #[test]
    fn a_member_that_panics_wakes_those_that_wait_for_it_in_a_collective() {
        let group = group(3, ReplicaOptions::default());
        let (sender, receiver) = bounded(3);
        let start = Instant::now();
        group.order().enqueue(Arc::new(Act("meet", move |member: &MemberContext<Flex>| {
            if member.rank == 2 {
                panic!("no meeting today");
            }
            member.communicator.barrier()?;
            let _ = sender.send((member.rank, ()));
            Ok(())
        })));
        let error = group.collect(&receiver, 0..3).unwrap_err();
        assert!(start.elapsed() < seconds(10.0));
        let message = error.to_string();
        assert!(message.contains("member 2 of 3 failed in meet: no meeting today"), "{message}");
    }

    #[test]
    fn a_full_queue_of_a_hanging_member_is_an_error_not_a_hang() {
        let options = ReplicaOptions { timeout: seconds(0.3), max_queued_ops: 1, ..Default::default() };
        let group = group(1, options);
        let (release, held) = mpsc::channel::<()>();
        let held = Arc::new(Mutex::new(held));
        let panic = catch_unwind(AssertUnwindSafe(|| {
            for _ in 0..5 {
                let held = held.clone();
                group.order().enqueue(Arc::new(Act("hang", move |_: &MemberContext<Flex>| {
                    let _ = held.lock().unwrap().recv();
                    Ok(())
                })));
            }
        }));
        assert!(message_of(&*panic.unwrap_err()).contains("hang"));
        assert!(matches!(group.broken(), Some(ReplicaError::Timeout { member: 0, .. })));
        drop(release);
    }

    #[test]
    fn a_broken_group_runs_nothing_more_and_ends_its_threads() {
        let group = group(2, ReplicaOptions::default());
        let (sender, receiver) = bounded::<(usize, ())>(2);
        {
            let order = group.order();
            order.enqueue(Arc::new(Act("fail", |_: &MemberContext<Flex>| panic!("first cause"))));
            order.enqueue(Arc::new(Act("later", move |member: &MemberContext<Flex>| {
                let _ = sender.send((member.rank, ()));
                Ok(())
            })));
        }
        let error = group.collect(&receiver, 0..2).unwrap_err();
        assert!(error.to_string().contains("first cause"));
        let state = Arc::downgrade(&group.state);
        drop(group);
        let start = Instant::now();
        while state.strong_count() > 0 {
            assert!(start.elapsed() < seconds(10.0), "the members' threads still run");
            thread::sleep(seconds(0.01));
        }
    }
}
