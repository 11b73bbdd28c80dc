//! Small values that all ranks of a run can set and read, before and beside any collective.
//!
//! A store is for exchanging ids and agreeing on configuration, not for tensors: keys and values are bounded.
//! [`MemoryStore`] serves ranks that are threads, [`TcpStore`] processes; rank 0 hosts it.

use std::time::Duration;

mod client;
mod error;
mod host;
mod memory;
mod tcp;
mod wire;

pub use error::{Refusal, StoreError};
pub(crate) use host::bind as listen;
pub use memory::MemoryStore;
pub use tcp::TcpStore;
pub(crate) use tcp::show;

/// The longest key, in bytes.
pub const MAX_KEY_BYTES: usize = 1024;
/// The longest value, in bytes.
pub const MAX_VALUE_BYTES: usize = 1 << 20;
/// The most keys that one [`wait`](Store::wait) can name.
pub const MAX_WAIT_KEYS: usize = 1 << 16;
/// The most that all keys and values of a store can take, in bytes.
pub const MAX_STORE_BYTES: usize = 64 << 20;

/// Values by key, shared by all ranks.
///
/// # Errors
///
/// Any method can fail with
///
/// - [`StoreError::TooLong`] for a key or value over the bounds above, or too many keys at once,
/// - [`StoreError::HostGone`] if the process that hosts the store has ended, closed it or does not answer,
/// - [`StoreError::Closed`] if this process has closed it.
///
/// A method's own section lists what else it refuses. After [`StoreError::HostGone`] a store is lost for good; any other
/// error leaves it as it was.
pub trait Store: Send + Sync {
    /// Gives `key` a value, and wakes who waits for it; an earlier value is replaced.
    ///
    /// # Errors
    ///
    /// [`StoreError::Full`] if all values together would be too large.
    fn set(&self, key: &str, value: &[u8]) -> Result<(), StoreError>;

    /// The value of `key`, as soon as somebody has set it.
    ///
    /// # Errors
    ///
    /// [`StoreError::Timeout`] if nobody does within `timeout`.
    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>, StoreError>;

    /// Adds to the number at `key`, 0 if unset, and gives the sum; at once for all ranks, so each gets a sum of its own.
    ///
    /// The value is the number's decimal digits, as [`get`](Self::get) shows.
    ///
    /// # Errors
    ///
    /// [`StoreError::NotANumber`] if the value is none, or the sum is too large for one;
    /// [`StoreError::Full`] if all values together would be too large.
    fn add(&self, key: &str, amount: i64) -> Result<i64, StoreError>;

    /// Comes back as soon as all `keys` have been set.
    ///
    /// # Errors
    ///
    /// [`StoreError::Timeout`], with the keys that are missing, if they are not within `timeout`.
    fn wait(&self, keys: &[&str], timeout: Duration) -> Result<(), StoreError>;
}

/// Refuses what no store takes, before anything is copied or sent.
fn check_keys<'a>(keys: impl IntoIterator<Item = &'a str>) -> Result<(), StoreError> {
    let mut num_keys = 0;
    for key in keys {
        within("the key", key.len(), MAX_KEY_BYTES)?;
        num_keys += 1;
    }
    if num_keys > MAX_WAIT_KEYS {
        return Err(StoreError::TooLong {
            what: "the list of keys",
            actual: num_keys,
            max: MAX_WAIT_KEYS,
            unit: "keys",
        });
    }
    Ok(())
}

fn check_value(value: &[u8]) -> Result<(), StoreError> {
    within("the value", value.len(), MAX_VALUE_BYTES)
}

fn within(what: &'static str, actual: usize, max: usize) -> Result<(), StoreError> {
    if actual > max { Err(StoreError::TooLong { what, actual, max, unit: "bytes" }) } else { Ok(()) }
}
