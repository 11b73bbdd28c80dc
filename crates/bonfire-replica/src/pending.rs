//! Sums that are in parts and not formed yet, so that they can be formed together.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, PoisonError, Weak,
        atomic::{AtomicU64, Ordering},
    },
    thread::{self, ThreadId},
};

use burn_backend::{DType, Shape};

use crate::{
    Member,
    tensor::{Parts, Storage, Sum},
};

/// Sums in parts, by the thread that made them. Held weakly: a sum that nobody needs any more is never formed.
pub(crate) struct PendingSums<B: Member> {
    threads: Mutex<HashMap<ThreadId, ThreadSums<B>>>,
    num_sums: AtomicU64,
}

/// The sums of one thread, and what it did last about them.
struct ThreadSums<B: Member> {
    storages: Vec<Weak<Storage<B>>>,
    /// Number of the last sum it made that is no statistic: a gradient.
    last_gradient: u64,
    /// How often it had statistics formed early since it last made a sum.
    num_early: usize,
}

impl<B: Member> Default for PendingSums<B> {
    fn default() -> Self {
        Self { threads: Mutex::new(HashMap::new()), num_sums: AtomicU64::new(0) }
    }
}

impl<B: Member> Default for ThreadSums<B> {
    fn default() -> Self {
        Self { storages: Vec::new(), last_gradient: 0, num_early: 0 }
    }
}

impl<B: Member> PendingSums<B> {
    /// A new sum of the calling thread, in parts, to be formed together with its others.
    pub(crate) fn add(&self, shape: Shape, dtype: DType, parts: Arc<Parts<B>>, statistic: bool) -> Arc<Storage<B>> {
        /// Sums that were never asked for, and threads that have ended, are forgotten now and then.
        const CLEAN_EVERY: u64 = 256;
        let number = self.num_sums.fetch_add(1, Ordering::Relaxed) + 1;
        let storage = Arc::new(Storage::partial(shape, dtype, parts, Sum::new(number, statistic)));
        let mut threads = self.threads.lock().unwrap_or_else(PoisonError::into_inner);
        if number.is_multiple_of(CLEAN_EVERY) {
            threads.retain(|_, sums| {
                sums.storages.retain(|storage| storage.strong_count() > 0);
                !sums.storages.is_empty()
            });
        }
        let mine = threads.entry(thread::current().id()).or_default();
        mine.storages.push(Arc::downgrade(&storage));
        mine.num_early = 0;
        if !statistic {
            mine.last_gradient = number;
        }
        storage
    }

    /// Whether sums are asked for by the pass that makes them, and not by an optimizer: statistics after which the
    /// calling thread made no gradient, and of which only a few were asked for since it made the last. Then gradients
    /// that accumulate stay pending. Decided by the order of the calling thread's program alone.
    pub(crate) fn is_early<'s>(&self, mut asked: impl Iterator<Item = &'s Sum>) -> bool {
        /// Branches that run beside each other have their statistics made first, and then asked for: two in a residual
        /// block. An optimizer asks for many sums in turn, of which gradients of biases look like statistics.
        const MAX_BRANCHES: usize = 2;
        let mut threads = self.threads.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(mine) = threads.get_mut(&thread::current().id()) else { return false };
        let is_late = |sum: &Sum| sum.is_statistic() && sum.number() > mine.last_gradient;
        let is_early = mine.num_early < MAX_BRANCHES && asked.all(is_late);
        mine.num_early += usize::from(is_early);
        is_early
    }

    /// The calling thread's sums that somebody still holds; none of them is pending afterwards.
    pub(crate) fn take(&self) -> Vec<Arc<Storage<B>>> {
        let mut threads = self.threads.lock().unwrap_or_else(PoisonError::into_inner);
        let mine = threads.get_mut(&thread::current().id()).map(|mine| std::mem::take(&mut mine.storages));
        mine.unwrap_or_default().iter().filter_map(Weak::upgrade).collect()
    }
}
