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
use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded};

use crate::{Member, ReplicaError, ReplicaOptions, member::MemberCommunicator};

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
}

/// What a task sees of the member that runs it.
pub(crate) struct MemberContext<B: Member> {
    pub(crate) rank: usize,
    pub(crate) device: B::Device,
    pub(crate) communicator: MemberCommunicator,
}

/// N members that behave as one device. Kept alive by its devices and tensors; its threads end with it.
pub(crate) struct Group<B: Member> {
    pub(crate) devices: Vec<B::Device>,
    pub(crate) options: ReplicaOptions,
    queues: Vec<Sender<Arc<dyn Task<B>>>>,
    /// Whoever enqueues holds it, so that all members see all tasks in one order.
    order: Mutex<()>,
    state: Arc<GroupState>,
    counts: Arc<Counts>,
    /// Dtypes that the inner backend chooses itself (indices, mostly), learned from the first result of an operation.
    learned: Mutex<HashMap<(OutputKey, DType), DType>>,
}

/// Beyond it the memory maps of threads run out before anything can be reported.
const MAX_MEMBERS: usize = 1024;

/// An operation's name and which of its outputs.
pub(crate) type OutputKey = (&'static str, usize);

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
    /// [`ReplicaError::NoMembers`], [`ReplicaError::Shares`] and [`ReplicaError::Option`] for settings that cannot
    /// work, [`ReplicaError::Start`] if a thread cannot be started.
    pub(crate) fn start(devices: Vec<B::Device>, options: ReplicaOptions) -> Result<Self, ReplicaError> {
        let num_members = NonZeroUsize::new(devices.len()).ok_or(ReplicaError::NoMembers)?;
        if num_members.get() > MAX_MEMBERS {
            return Err(ReplicaError::TooManyMembers { num_members: num_members.get(), limit: MAX_MEMBERS });
        }
        options.validate(num_members.get())?;
        let num_threads = options.threads_per_member.unwrap_or_else(|| {
            let cores = thread::available_parallelism().map_or(1, usize::from);
            (cores / num_members).max(1)
        });

        let state = Arc::new(GroupState {
            broken: OnceLock::new(),
            progress: devices.iter().map(|_| Progress::default()).collect(),
            queued_bytes: QueuedBytes::default(),
        });
        let mut queues = Vec::with_capacity(devices.len());
        let mut counts = None;
        let communicators = ThreadCommunicator::group(num_members, options.timeout);
        for (rank, (device, communicator)) in devices.iter().cloned().zip(communicators).enumerate() {
            let (queue, tasks) = bounded(options.max_queued_ops);
            let communicator = Counting::new(communicator);
            counts.get_or_insert_with(|| communicator.counts());
            let worker = Worker {
                context: MemberContext { rank, device, communicator },
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
            devices,
            options,
            queues,
            order: Mutex::new(()),
            state,
            counts: counts.expect("at least one member"),
            learned: Mutex::new(HashMap::new()),
        })
    }

    pub(crate) fn num_members(&self) -> usize {
        self.devices.len()
    }

    /// The device on which tensors live before they are spread.
    pub(crate) fn home(&self) -> &B::Device {
        &self.devices[0]
    }

    /// Collectives that the first member has run; every member runs the same.
    pub(crate) fn counts(&self) -> &Counts {
        &self.counts
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
        self.assert_whole();
        Order { group: self, _guard: self.order.lock().unwrap_or_else(PoisonError::into_inner) }
    }

    /// # Panics
    ///
    /// With the first cause, if the group is broken.
    pub(crate) fn assert_whole(&self) {
        if let Some(cause) = self.broken() {
            panic!("{cause}");
        }
    }

    /// Waits for what `member` sends.
    ///
    /// # Errors
    ///
    /// The group's first cause, or [`ReplicaError::Timeout`] once no task of the member has ended for the whole
    /// timeout.
    pub(crate) fn wait<T>(&self, replies: &Receiver<T>, member: usize) -> Result<T, ReplicaError> {
        let progress = &self.state.progress[member];
        let mut num_done = progress.num_done.load(Ordering::Relaxed);
        let mut since = Instant::now();
        loop {
            // Woken now and then to see whether the member still gets on.
            match replies.recv_timeout(self.options.timeout.min(Duration::from_secs(1))) {
                Ok(reply) => return Ok(reply),
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(self.broken().cloned().unwrap_or_else(|| ReplicaError::Panicked {
                        member,
                        num_members: self.num_members(),
                        operation: progress.operation(),
                        message: "its thread ended".into(),
                    }));
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
            let now_done = progress.num_done.load(Ordering::Relaxed);
            if now_done != num_done {
                (num_done, since) = (now_done, Instant::now());
            } else if since.elapsed() >= self.options.timeout {
                let error = ReplicaError::Timeout {
                    member,
                    num_members: self.num_members(),
                    operation: progress.operation(),
                    waited: since.elapsed(),
                };
                return Err(self.state.broken.get_or_init(|| error).clone());
            }
        }
    }

    pub(crate) fn learned_dtype(&self, output: OutputKey, input: DType) -> Option<DType> {
        let learned = self.learned.lock().unwrap_or_else(PoisonError::into_inner);
        learned.get(&(output, input)).copied()
    }

    pub(crate) fn learn_dtype(&self, output: OutputKey, input: DType, dtype: DType) {
        let mut learned = self.learned.lock().unwrap_or_else(PoisonError::into_inner);
        learned.insert((output, input), dtype);
    }
}

/// The right to enqueue tasks, held by one caller at a time.
pub(crate) struct Order<'a, B: Member> {
    pub(crate) group: &'a Group<B>,
    _guard: MutexGuard<'a, ()>,
}

impl<B: Member> Order<'_, B> {
    /// Puts one task into every member's queue; waits while a queue is full. A member that waits in a collective has
    /// its partners' tasks already queued, since each task goes to all members before the next one does.
    pub(crate) fn enqueue(&self, task: Arc<dyn Task<B>>) {
        let state = &self.group.state;
        let bytes = task.carried_bytes();
        if bytes > 0 {
            state.queued_bytes.reserve(bytes * self.group.queues.len(), self.group.options.max_queued_bytes);
        }
        for queue in &self.group.queues {
            // A member's thread outlives its queue, broken or not: it ends when the queue does.
            queue.send(task.clone()).expect("a member's thread drains its queue to the end");
        }
    }
}

impl QueuedBytes {
    fn reserve(&self, bytes: usize, limit: usize) {
        let mut guard = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        // A task larger than the limit goes through alone.
        while self.bytes.load(Ordering::Acquire) > 0 && self.bytes.load(Ordering::Acquire) + bytes > limit {
            guard = self.freed.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
        self.bytes.fetch_add(bytes, Ordering::AcqRel);
    }

    fn free(&self, bytes: usize) {
        let guard = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        self.bytes.fetch_sub(bytes, Ordering::AcqRel);
        drop(guard);
        self.freed.notify_all();
    }
}

impl Progress {
    fn operation(&self) -> &'static str {
        let operation = *self.operation.lock().unwrap_or_else(PoisonError::into_inner);
        if operation.is_empty() { "nothing yet" } else { operation }
    }

    fn begin(&self, operation: &'static str) {
        *self.operation.lock().unwrap_or_else(PoisonError::into_inner) = operation;
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
            if self.state.broken.get().is_none() {
                self.run_task(&*task);
            }
            drop(task);
            if bytes > 0 {
                self.state.queued_bytes.free(bytes);
            }
        }
    }

    fn run_task(&self, task: &dyn Task<B>) {
        let progress = &self.state.progress[self.context.rank];
        progress.begin(task.operation());
        let (member, num_members) = (self.context.rank, self.context.communicator.world_size());
        let operation = task.operation();
        match catch_unwind(AssertUnwindSafe(|| task.run(&self.context))) {
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
        progress.num_done.fetch_add(1, Ordering::Relaxed);
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
