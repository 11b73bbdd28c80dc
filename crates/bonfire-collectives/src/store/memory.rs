//! A store in the memory of one process.

use std::{
    collections::HashMap,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use super::{MAX_STORE_BYTES, Store, StoreError, check_keys, check_value};

/// A store for ranks that are threads of one process; clones share it.
#[derive(Clone, Default)]
pub struct MemoryStore {
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    values: HashMap<String, Vec<u8>>,
    num_bytes: usize,
    is_closed: bool,
}

/// Beyond it a wait is taken to be without end, which no clock can add up.
const MAX_TIMEOUT: Duration = Duration::from_secs(365 * 24 * 3600);
/// What an entry takes beside its key and value, roughly.
const ENTRY_BYTES: usize = 64;

impl MemoryStore {
    /// An empty store.
    pub fn new() -> Self {
        Self::default()
    }

    /// Has every call that waits, and every later one, fail with [`StoreError::Closed`].
    pub(super) fn close(&self) {
        self.lock().is_closed = true;
        self.shared.changed.notify_all();
    }

    /// Never poisoned in effect: no code under the lock can leave the state half changed.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.shared.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_open(&self) -> Result<MutexGuard<'_, State>, StoreError> {
        let state = self.lock();
        if state.is_closed { Err(StoreError::Closed) } else { Ok(state) }
    }

    /// The state in which all `keys` are set.
    fn when_set(&self, keys: &[&str], timeout: Duration) -> Result<MutexGuard<'_, State>, StoreError> {
        let start = Instant::now();
        let timeout = timeout.min(MAX_TIMEOUT);
        let mut state = self.lock_open()?;
        // Keys are never taken away, so those that were there need not be looked for again.
        let mut num_set = 0;
        loop {
            while keys.get(num_set).is_some_and(|key| state.values.contains_key(*key)) {
                num_set += 1;
            }
            if num_set == keys.len() {
                return Ok(state);
            }
            let waited = start.elapsed();
            let Some(remaining) = timeout.checked_sub(waited).filter(|remaining| !remaining.is_zero()) else {
                let missing = keys[num_set..].iter().filter(|key| !state.values.contains_key(**key));
                let keys = missing.map(|key| (*key).to_owned()).collect();
                return Err(StoreError::Timeout { keys, waited, absent: Vec::new() });
            };
            let changed = self.shared.changed.wait_timeout(state, remaining);
            state = changed.unwrap_or_else(PoisonError::into_inner).0;
            if state.is_closed {
                return Err(StoreError::Closed);
            }
        }
    }
}

impl State {
    fn insert(&mut self, key: &str, value: Vec<u8>) -> Result<(), StoreError> {
        let num_bytes = match self.values.get(key) {
            Some(previous) => self.num_bytes - previous.len() + value.len(),
            None => self.num_bytes + key.len() + value.len() + ENTRY_BYTES,
        };
        if num_bytes > MAX_STORE_BYTES {
            return Err(StoreError::Full { max_bytes: MAX_STORE_BYTES });
        }
        self.num_bytes = num_bytes;
        self.values.insert(key.to_owned(), value);
        Ok(())
    }
}

impl Store for MemoryStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<(), StoreError> {
        check_keys([key])?;
        check_value(value)?;
        self.lock_open()?.insert(key, value.to_vec())?;
        self.shared.changed.notify_all();
        Ok(())
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>, StoreError> {
        check_keys([key])?;
        let state = self.when_set(&[key], timeout)?;
        Ok(state.values[key].clone())
    }

    fn add(&self, key: &str, amount: i64) -> Result<i64, StoreError> {
        check_keys([key])?;
        let mut state = self.lock_open()?;
        let refused = |reason: String| StoreError::NotANumber { key: key.to_owned(), reason };
        let number = match state.values.get(key) {
            None => 0,
            Some(value) => match std::str::from_utf8(value).ok().and_then(|text| text.parse::<i64>().ok()) {
                Some(number) => number,
                None => return Err(refused(format!("its {} bytes are no number", value.len()))),
            },
        };
        let sum = number
            .checked_add(amount)
            .ok_or_else(|| refused(format!("{number} and {amount} are too much for 64 bits")))?;
        state.insert(key, sum.to_string().into_bytes())?;
        self.shared.changed.notify_all();
        Ok(sum)
    }

    fn wait(&self, keys: &[&str], timeout: Duration) -> Result<(), StoreError> {
        check_keys(keys.iter().copied())?;
        self.when_set(keys, timeout).map(drop)
    }
}
