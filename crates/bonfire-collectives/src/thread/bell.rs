//! Waiting for other ranks: spin for a moment, then sleep.

use std::{
    hint,
    num::NonZeroUsize,
    sync::{
        Condvar, Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

/// How long a waiting rank keeps its core busy before it sleeps: longer than a small collective, shorter
/// than waking a thread is worth.
const SPIN: Duration = Duration::from_micros(50);

/// Spins between two looks at the clock, which costs as much as several looks at the condition.
const SPINS_PER_LOOK: u32 = 16;

/// Lets ranks wait until something holds, and wakes them.
pub(super) struct Bell {
    /// Zero where ranks outnumber cores: a spinning rank would keep the one it waits for from running.
    spin: Duration,
    num_sleepers: AtomicUsize,
    /// Guards no data: holding it while looking makes "look, then sleep" one step for [`ring`](Self::ring).
    looking: Mutex<()>,
    rung: Condvar,
}

impl Bell {
    pub(super) fn new(world_size: NonZeroUsize) -> Self {
        let num_cores = thread::available_parallelism().map_or(1, NonZeroUsize::get);
        Self {
            spin: if world_size.get() <= num_cores { SPIN } else { Duration::ZERO },
            num_sleepers: AtomicUsize::new(0),
            looking: Mutex::new(()),
            rung: Condvar::new(),
        }
    }

    /// Whether ranks outnumber cores, so that waiting means sleeping.
    pub(super) const fn is_crowded(&self) -> bool {
        self.spin.is_zero()
    }

    /// Waits until `ready`, or until `deadline`; says whether `ready` held.
    ///
    /// `ready` must load, with `SeqCst`, what others store with `SeqCst` before they [`ring`](Self::ring).
    pub(super) fn wait(&self, deadline: Option<Instant>, ready: impl Fn() -> bool) -> bool {
        self.spin(&ready) || self.sleep(deadline, ready)
    }

    /// Wakes every rank that waits, to look again.
    ///
    /// A sleeper counts itself before it looks, and a ringer stores before it counts the sleepers. In the
    /// one order of all `SeqCst` accesses, either the sleeper's look comes after the store, or the ringer
    /// sees a sleeper; then it takes the lock, so that the sleeper has gone to sleep, and wakes it.
    pub(super) fn ring(&self) {
        if self.num_sleepers.load(Ordering::SeqCst) > 0 {
            drop(self.looking.lock().unwrap_or_else(PoisonError::into_inner));
            self.rung.notify_all();
        }
    }

    fn spin(&self, ready: &impl Fn() -> bool) -> bool {
        if ready() {
            return true;
        }
        if self.spin.is_zero() {
            return false;
        }
        let started = Instant::now();
        while started.elapsed() < self.spin {
            for _ in 0..SPINS_PER_LOOK {
                if ready() {
                    return true;
                }
                hint::spin_loop();
            }
        }
        false
    }

    fn sleep(&self, deadline: Option<Instant>, ready: impl Fn() -> bool) -> bool {
        self.num_sleepers.fetch_add(1, Ordering::SeqCst);
        let mut looking = self.looking.lock().unwrap_or_else(PoisonError::into_inner);
        let held = loop {
            if ready() {
                break true;
            }
            looking = match deadline {
                None => self.rung.wait(looking).unwrap_or_else(PoisonError::into_inner),
                Some(deadline) => {
                    let left = deadline.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        break false;
                    }
                    self.rung.wait_timeout(looking, left).unwrap_or_else(PoisonError::into_inner).0
                }
            };
        };
        drop(looking);
        self.num_sleepers.fetch_sub(1, Ordering::SeqCst);
        held
    }
}
