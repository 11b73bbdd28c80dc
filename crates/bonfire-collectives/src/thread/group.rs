//! The life of one collective between threads.
//!
//! Ranks look into each other's borrowed buffers, so no rank may leave while another may still look.
//! What makes that hold:
//!
//! 1. *Deposit.* A rank takes the lock, stores a pointer to its [`Deposit`] in its seat, and sets `waiting`.
//!    Nobody reads a buffer yet, and nobody reads a deposit whose rank is not `waiting` but inside a round.
//! 2. *Commit.* The rank whose deposit completes the round, the leader, compares the deposits and clears
//!    `waiting` of all members, all under the same lock hold. From here on nothing can stop the round.
//! 3. *Withdraw.* A rank whose wait ends with a timeout or a broken group takes the lock. If it is still
//!    `waiting`, no commit has happened nor can one: it clears `waiting` and leaves. Otherwise it is in a
//!    committed round and waits on, without a deadline.
//! 4. *Work.* Either the leader does everybody's share alone and then settles every member, or it settles
//!    them first and all work together through the steps, each ending in a stage that nobody passes before
//!    all have come. Shares are loops over memory: they wait for nothing and run no code of a caller.
//!    Should one panic all the same, a guard still settles and passes the stages that are left.
//! 5. *Leave.* A member leaves after it was settled by a leader that had worked alone, or after the last stage.
//!    Both come after the last look at any member's buffers or deposit.

use std::{
    num::NonZeroUsize,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use super::{
    bell::Bell,
    deposit::Deposit,
    round::{Members, Round, Settle, Step, work_together},
    verdict::{self, Verdict},
};
use crate::{CollectiveError, broken::Break, call::Call};

/// Up to this many bytes over all ranks the leader works alone.
///
/// Measured with two ranks on two cores: alone and together take 1.0 us for 1 KiB a rank, alone takes 1.5 us and
/// together 1.2 us for 4 KiB.
const ALONE_BYTES: usize = 4 * 1024;

/// The same where ranks outnumber cores, so that working together means switching threads.
///
/// Measured on two cores: four ranks take 23 us alone and 55 us together for 64 KiB a rank, 57 and 92 us for 256 KiB;
/// eight take 114 and 110 us for 64 KiB, 184 and 136 us for 128 KiB.
const ALONE_BYTES_CROWDED: usize = 512 * 1024;

/// The ranks that are threads of this process, and the collective they are in.
pub(super) struct Group {
    timeout: Duration,
    state: Mutex<State>,
    /// Mirrors whether `State::broken` is set, for ranks that wait.
    is_broken: AtomicBool,
    /// A share panicked, so what the members of that round hold is not a result.
    is_spoiled: AtomicBool,
    /// How often any rank has come to a stage, over all rounds.
    num_arrivals: AtomicU64,
    seats: Box<[Seat]>,
    bell: Bell,
}

/// What is decided under the lock.
struct State {
    /// Whose deposit lies in its seat, not yet part of a round.
    waiting: Vec<bool>,
    /// How many calls a rank had made when it gave up its communicator.
    ended: Vec<Option<u64>>,
    broken: Option<Break>,
}

/// One rank's place, a pair of cache lines for itself.
#[repr(align(128))]
struct Seat {
    /// Stored by the seat's rank under the lock.
    deposit: AtomicPtr<Deposit<'static>>,
    /// The number of this rank's calls that a leader has settled.
    num_settled: AtomicU64,
}

/// What a rank must remember from call to call.
#[derive(Default)]
pub(super) struct Progress {
    pub(super) num_calls: u64,
    /// The arrivals that complete the last stage this rank came to.
    num_arrivals: u64,
}

impl Group {
    pub(super) fn new(world_size: NonZeroUsize, timeout: Duration) -> Self {
        let seat = || Seat { deposit: AtomicPtr::default(), num_settled: AtomicU64::new(0) };
        Self {
            timeout,
            state: Mutex::new(State {
                waiting: vec![false; world_size.get()],
                ended: vec![None; world_size.get()],
                broken: None,
            }),
            is_broken: AtomicBool::new(false),
            is_spoiled: AtomicBool::new(false),
            num_arrivals: AtomicU64::new(0),
            seats: (0..world_size.get()).map(|_| seat()).collect(),
            bell: Bell::new(world_size),
        }
    }

    pub(super) fn world_size(&self) -> usize {
        self.seats.len()
    }

    pub(super) const fn timeout(&self) -> Duration {
        self.timeout
    }

    /// What broke the group, if it is broken.
    pub(super) fn first_cause(&self) -> Option<Arc<CollectiveError>> {
        self.lock().broken.as_ref().map(|broken| broken.cause.clone())
    }

    /// Breaks the group for good, unless it is broken; says whether this was the first cause.
    pub(super) fn break_off(&self, cause: CollectiveError) -> bool {
        let mut state = self.lock();
        let is_first = state.broken.is_none();
        self.set_broken(&mut state, cause, Vec::new());
        is_first
    }

    /// Notes that a rank has ended, which breaks the group as soon as another needs it.
    pub(super) fn end(&self, rank: usize, num_calls: u64) {
        let mut state = self.lock();
        state.ended[rank] = Some(num_calls);
        let hopeless = |deposit: &Deposit<'_>| verdict::ended_partner(deposit, &state.ended);
        let cause = (0..self.world_size()).find_map(|rank| self.waiting(&state, rank).and_then(hopeless));
        if let Some(cause) = cause {
            self.set_broken(&mut state, cause, Vec::new());
        }
    }

    /// Takes `call.rank` through one collective: comes back when nobody looks at its deposit any more.
    ///
    /// `progress` is this rank's own and its exclusive borrow keeps a rank to one call at a time.
    pub(super) fn run(
        &self,
        call: Call,
        progress: &mut Progress,
        deposit: &Deposit<'_>,
        steps: &[Step],
    ) -> Result<(), CollectiveError> {
        let started = Instant::now();
        progress.num_calls += 1;
        let alone = self.works_alone(deposit);
        match self.deposit(call, deposit)? {
            Some(members) => {
                // SAFETY: this call has just committed the round and leaves it when `lead` returns.
                let round = unsafe { Round::new(self, members) };
                self.lead(call.rank, progress, &round, steps, alone);
            }
            None => {
                self.await_settled(call, progress.num_calls, started)?;
                if !alone {
                    // SAFETY: settled, so committed, and by a leader that works together with all members.
                    let round = unsafe { Round::new(self, Members::All) };
                    work_together(&round, call.rank, progress, steps);
                }
            }
        }
        self.check_unspoiled(call)
    }

    /// Whether one rank does everybody's work; the same answer on every rank of a round, since it looks at
    /// nothing but what the verdict has compared.
    fn works_alone(&self, deposit: &Deposit<'_>) -> bool {
        let limit = if self.bell.is_crowded() { ALONE_BYTES_CROWDED } else { ALONE_BYTES };
        deposit.collective.is_point_to_point() || deposit.num_bytes().saturating_mul(self.world_size()) <= limit
    }

    /// Lays the deposit down; the members of the round if that committed it.
    fn deposit(&self, call: Call, deposit: &Deposit<'_>) -> Result<Option<Members>, CollectiveError> {
        let mut state = self.lock();
        if let Some(broken) = &state.broken {
            return Err(broken.refuse(call));
        }
        let present = |rank| if rank == call.rank { Some(deposit) } else { self.waiting(&state, rank) };
        let verdict = verdict::judge(call, present, &state.ended);
        // Nothing from here to the end of the lock panics, so nothing unwinds past a deposit that waits.
        let erased = core::ptr::from_ref(deposit).cast_mut().cast::<Deposit<'static>>();
        self.seats[call.rank].deposit.store(erased, Ordering::Relaxed);
        match verdict {
            Verdict::Wait => {
                state.waiting[call.rank] = true;
                Ok(None)
            }
            Verdict::Commit(members) => {
                members.iter(self.world_size()).for_each(|rank| state.waiting[rank] = false);
                Ok(Some(members))
            }
            Verdict::Fail { cause, concerned } => {
                let error = self.set_broken(&mut state, cause, concerned).explain(call, Duration::ZERO);
                drop(state);
                tracing::error!(%error, "process group broken");
                Err(error)
            }
        }
    }

    /// Works and settles the members, as the rank that committed the round.
    fn lead(&self, rank: usize, progress: &mut Progress, round: &Round<'_>, steps: &[Step], alone: bool) {
        let settle = Settle::new(round, rank, progress.num_calls);
        if alone {
            round.work_alone(rank, steps);
            settle.finish();
        } else {
            settle.finish();
            work_together(round, rank, progress, steps);
        }
    }

    /// Waits until a leader has settled this rank's call, or withdraws its deposit.
    fn await_settled(&self, call: Call, num_calls: u64, started: Instant) -> Result<(), CollectiveError> {
        let settled = || self.seats[call.rank].num_settled.load(Ordering::SeqCst) >= num_calls;
        let deadline = started.checked_add(self.timeout);
        self.bell.wait(deadline, || settled() || self.is_broken.load(Ordering::SeqCst));
        if settled() {
            return Ok(());
        }
        let mut state = self.lock();
        if !state.waiting[call.rank] {
            drop(state);
            self.bell.wait(None, settled);
            return Ok(());
        }
        state.waiting[call.rank] = false;
        let waited = started.elapsed();
        if let Some(broken) = &state.broken {
            return Err(broken.explain(call, waited));
        }
        let (cause, concerned) = self.missing(&state, call, waited);
        let error = self.set_broken(&mut state, cause, concerned).explain(call, waited);
        drop(state);
        tracing::error!(%error, "process group broken");
        Err(error)
    }

    /// Who did not come to a call in time, and who waits for them too.
    fn missing(&self, state: &State, call: Call, waited: Duration) -> (CollectiveError, Vec<usize>) {
        let Call { rank, world_size, collective } = call;
        // SAFETY: the caller's own deposit, in place until it leaves.
        let own = unsafe { self.peek(rank) };
        let came = |&other: &usize| {
            other == rank || self.waiting(state, other).is_some_and(|deposit| deposit.partner().is_none())
        };
        let (concerned, missing) = match own.partner() {
            Some(partner) => (vec![rank], vec![partner]),
            None => (0..world_size).partition(came),
        };
        (CollectiveError::Timeout { rank, world_size, collective, waited, missing }, concerned)
    }

    /// The deposit of a rank that waits. It stays while the lock is held: ranks withdraw under it.
    fn waiting<'s>(&'s self, state: &'s State, rank: usize) -> Option<&'s Deposit<'s>> {
        // SAFETY: `rank` is waiting, and `state` shows that the lock is held while the reference is used.
        state.waiting[rank].then(|| unsafe { self.peek(rank) })
    }

    /// Sets the first cause, unless there is one, and wakes all who wait; gives the first cause.
    fn set_broken<'s>(&self, state: &'s mut State, cause: CollectiveError, concerned: Vec<usize>) -> &'s Break {
        let broken = state.broken.get_or_insert_with(|| Break { cause: Arc::new(cause), concerned });
        self.is_broken.store(true, Ordering::SeqCst);
        self.bell.ring();
        broken
    }

    fn check_unspoiled(&self, call: Call) -> Result<(), CollectiveError> {
        if !self.is_spoiled.load(Ordering::SeqCst) {
            return Ok(());
        }
        self.lock().broken.as_ref().map_or(Ok(()), |broken| Err(broken.refuse(call)))
    }

    /// A panic in a critical section cannot leave the state half changed: it only holds flags and a cause.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// For committed rounds.
impl Group {
    /// The deposit in the seat of `rank`.
    ///
    /// # Safety
    ///
    /// For as long as the reference is used, `rank` is waiting and the lock is held, or `rank` is a member of
    /// a round that the caller has not left, or is the caller inside [`run`](Self::run).
    pub(super) unsafe fn peek(&self, rank: usize) -> &Deposit<'_> {
        let deposit = self.seats[rank].deposit.load(Ordering::Relaxed);
        // SAFETY: stored under the lock that the caller held or was settled after; the caller vouches that
        // `rank` has not left since, and the deposit lies on its stack until then.
        unsafe { &*deposit }
    }

    /// Lets a member of a round go on.
    pub(super) fn settle(&self, members: Members) {
        for rank in members.iter(self.world_size()) {
            self.seats[rank].num_settled.fetch_add(1, Ordering::SeqCst);
        }
        self.bell.ring();
    }

    /// Waits until every rank has come to this stage.
    pub(super) fn pass_stage(&self, progress: &mut Progress) {
        let complete = progress.num_arrivals + self.world_size() as u64;
        progress.num_arrivals = complete;
        if self.num_arrivals.fetch_add(1, Ordering::SeqCst) + 1 == complete {
            self.bell.ring();
        } else {
            self.bell.wait(None, || self.num_arrivals.load(Ordering::SeqCst) >= complete);
        }
    }

    /// Marks the round in progress as worthless: a share of it panicked on `rank`.
    pub(super) fn spoil(&self, rank: usize, num_calls: u64) {
        self.is_spoiled.store(true, Ordering::SeqCst);
        let world_size = self.world_size();
        self.break_off(CollectiveError::RankEnded { rank, world_size, num_calls, panicked: true });
    }
}
