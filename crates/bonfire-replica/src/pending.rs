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
    /// Number of the sum it made last.
    last_number: u64,
    /// Whether one was formed early since then.
    had_early: bool,
}

impl<B: Member> Default for PendingSums<B> {
    fn default() -> Self {
        Self { threads: Mutex::new(HashMap::new()), num_sums: AtomicU64::new(0) }
    }
}

impl<B: Member> Default for ThreadSums<B> {
    fn default() -> Self {
        Self { storages: Vec::new(), last_number: 0, had_early: false }
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
        (mine.last_number, mine.had_early) = (number, false);
        storage
    }

    /// Whether sums are asked for by the pass that makes them, and not by an optimizer: statistics of which one is the
    /// last sum the calling thread made, and the first asked for since. Then gradients that accumulate stay pending.
    /// Decided by the order of the calling thread's program alone.
    pub(crate) fn is_early<'s>(&self, mut asked: impl Iterator<Item = &'s Sum> + Clone) -> bool {
        let mut threads = self.threads.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(mine) = threads.get_mut(&thread::current().id()) else { return false };
        let is_last = asked.clone().any(|sum| sum.number() == mine.last_number);
        let is_early = is_last && !mine.had_early && asked.all(Sum::is_statistic);
        mine.had_early |= is_early;
        is_early
    }

    /// The calling thread's sums that somebody still holds; none of them is pending afterwards.
    pub(crate) fn take(&self) -> Vec<Arc<Storage<B>>> {
        let mut threads = self.threads.lock().unwrap_or_else(PoisonError::into_inner);
        let mine = threads.get_mut(&thread::current().id()).map(|mine| std::mem::take(&mut mine.storages));
        mine.unwrap_or_default().iter().filter_map(Weak::upgrade).collect()
    }
}
