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
    /// Whether it had statistics formed early since it last made a sum.
    had_early: bool,
}

impl<B: Member> Default for PendingSums<B> {
    fn default() -> Self {
        Self { threads: Mutex::new(HashMap::new()), num_sums: AtomicU64::new(0) }
    }
}

impl<B: Member> Default for ThreadSums<B> {
    fn default() -> Self {
        Self { storages: Vec::new(), last_gradient: 0, had_early: false }
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
        mine.had_early = false;
        if !statistic {
            mine.last_gradient = number;
        }
        storage
    }

    /// The statistics that the calling thread made after those that are asked for, if these are asked for by the pass
    /// that makes them and not by an optimizer: they are statistics too, no gradient was made after them, and they are
    /// the first to be asked for since the last sum was made. Then gradients that accumulate stay pending, and branches
    /// that run beside each other, as in a residual block, have their statistics formed together.
    ///
    /// Decided by the order of the calling thread's program alone.
    pub(crate) fn take_early<'s>(&self, asked: impl Iterator<Item = &'s Sum>) -> Option<Vec<Arc<Storage<B>>>> {
        let mut threads = self.threads.lock().unwrap_or_else(PoisonError::into_inner);
        let mine = threads.get_mut(&thread::current().id())?;
        let mut first = u64::MAX;
        for sum in asked {
            if mine.had_early || !sum.is_statistic() || sum.number() < mine.last_gradient {
                return None;
            }
            first = first.min(sum.number());
        }
        mine.had_early = true;
        let is_early = |sum: &Sum| sum.is_statistic() && sum.number() >= first;
        let (early, rest) = std::mem::take(&mut mine.storages)
            .into_iter()
            .filter_map(|storage| storage.upgrade())
            .partition::<Vec<_>, _>(|storage| storage.as_sum().is_some_and(is_early));
        mine.storages = rest.iter().map(Arc::downgrade).collect();
        Some(early)
    }

    /// The calling thread's sums that somebody still holds; none of them is pending afterwards.
    pub(crate) fn take(&self) -> Vec<Arc<Storage<B>>> {
        let mut threads = self.threads.lock().unwrap_or_else(PoisonError::into_inner);
        let mine = threads.get_mut(&thread::current().id()).map(|mine| std::mem::take(&mut mine.storages));
        mine.unwrap_or_default().iter().filter_map(Weak::upgrade).collect()
    }
}
