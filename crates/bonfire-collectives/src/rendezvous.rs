//! How ranks make sure that they are of one run, before they rely on each other.
//!
//! Rank 0 shows what it was started with, every other rank reports where it differs, rank 0 says what came of it. So all
//! learn of all differences, and what is sent does not grow with the number of settings on every rank:
//!
//! ```text
//! rank 0        reference ------------------> collect reports -> verdict -> wait until all have read it
//! other ranks   ---------> compare -> report -------------------> read it -> say so
//! ```

use std::{
    collections::BTreeMap,
    fmt::Display,
    num::NonZeroUsize,
    time::{Duration, Instant},
};

use crate::{
    fingerprint::fingerprint,
    launch::LaunchConfig,
    store::{Store, StoreError},
};

/// A rank's place in a rendezvous.
#[derive(Clone, Copy, Debug)]
pub struct Meeting<'a> {
    /// Tells one rendezvous from another: each name can be used once per store.
    pub name: &'a str,
    /// This rank, below `world_size`.
    pub rank: usize,
    /// The number of ranks that it expects.
    pub world_size: NonZeroUsize,
    /// How long it waits for them.
    pub timeout: Duration,
}

/// Settings that must be the same on all ranks, by name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Configuration {
    entries: BTreeMap<String, String>,
}

/// A longer value is compared, and shown, by its length and fingerprint.
const MAX_SHOWN_BYTES: usize = 256;
/// How long rank 0 waits for the others to read the verdict, even if its time is over.
const READING: Duration = Duration::from_secs(2);
/// Every rank adds it to its configuration.
const WORLD_SIZE: &str = "world_size";

impl Configuration {
    /// No settings: only the number of ranks is compared.
    pub fn new() -> Self {
        Self::default()
    }

    /// With one more setting; an earlier one of the name is replaced.
    #[must_use]
    pub fn with(mut self, name: impl Into<String>, value: impl Display) -> Self {
        let value = value.to_string();
        let value = if value.len() <= MAX_SHOWN_BYTES {
            value
        } else {
            format!("{} bytes with fingerprint {:016x}", value.len(), fingerprint(value.as_bytes()))
        };
        self.entries.insert(name.into(), value);
        self
    }

    /// A number that differs where any name or value does, but for rare chance.
    pub fn fingerprint(&self) -> u64 {
        fingerprint(&self.encode())
    }

    fn encode(&self) -> Vec<u8> {
        encode(self.entries.iter().flat_map(|(name, value)| [name.as_str(), value.as_str()]))
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        Some(Self { entries: decode_pairs(bytes)?.into_iter().collect() })
    }

    /// Where this differs from `reference`: names with this one's values, if it has the setting.
    fn differences_from(&self, reference: &Self) -> BTreeMap<String, Option<String>> {
        let names = self.entries.keys().chain(reference.entries.keys());
        let differing = names.filter(|name| self.entries.get(*name) != reference.entries.get(*name));
        differing.map(|name| (name.clone(), self.entries.get(name).cloned())).collect()
    }
}

/// Meets all other ranks at `store`, and makes sure that they expect the same number of ranks and have the same
/// `configuration`.
///
/// When it is over, rank 0 knows that all others have what they need of the store.
///
/// ```no_run
/// use std::time::Duration;
///
/// use bonfire_collectives::{Configuration, LaunchConfig, Meeting, TcpStore, rendezvous};
///
/// let timeout = Duration::from_secs(60);
/// let config = LaunchConfig::from_env()?;
/// let store = TcpStore::join(&config, timeout)?;
/// let settings = Configuration::new().with("seed", 7).with("learning_rate", 0.1);
/// rendezvous(&store, &Meeting::new("start", &config, timeout), &settings)?;
/// // ... train ...
/// rendezvous(&store, &Meeting::new("end", &config, timeout), &settings)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
///
/// [`StoreError::Disagreement`], on every rank, if any two differ or two processes have one rank; it says what differs;
/// [`StoreError::RanksMissing`] if ranks do not come in time; and those of the store.
pub fn rendezvous(store: &dyn Store, meeting: &Meeting<'_>, configuration: &Configuration) -> Result<(), StoreError> {
    let &Meeting { rank, world_size, timeout, .. } = meeting;
    if rank >= world_size.get() {
        return Err(meeting.disagreement(vec![format!("rank {rank} is not below the world size of {world_size}")]));
    }
    let start = Instant::now();
    let remaining = || timeout.saturating_sub(start.elapsed());
    if store.add(&meeting.key("count", rank), 1)? > 1 {
        return Err(meeting.disagreement(vec![several_processes(rank)]));
    }
    let own = configuration.clone().with(WORLD_SIZE, world_size);
    if rank == 0 {
        let verdict = decide(store, meeting, &own, &remaining)?;
        return meeting.result(verdict, start);
    }

    let missing = |ranks| meeting.missing(ranks, start);
    let bytes = match store.get(&meeting.key("reference", 0), remaining()) {
        Err(StoreError::Timeout { .. }) => return Err(missing(vec![0])),
        result => result?,
    };
    let reference = Configuration::decode(&bytes).ok_or_else(|| meeting.foreign("reference"))?;
    let differences = own.differences_from(&reference);
    if reference.entries.get(WORLD_SIZE).and_then(|size| size.parse().ok()).is_none_or(|size: usize| rank >= size) {
        // Rank 0 knows nothing of this rank, and waits for no report.
        return Err(meeting.disagreement(describe(&reference, &BTreeMap::from([(rank, differences)]))));
    }
    store.set(&meeting.key("report", rank), &encode_report(&differences))?;
    let bytes = match store.get(&meeting.key("verdict", 0), remaining()) {
        Err(StoreError::Timeout { .. }) => return Err(missing(who_is_missing(store, meeting)?)),
        result => result?,
    };
    let verdict = Verdict::decode(&bytes).ok_or_else(|| meeting.foreign("verdict"))?;
    store.set(&meeting.key("read", rank), &[])?;
    meeting.result(verdict, start)
}

/// What rank 0 found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Verdict {
    missing: Vec<usize>,
    differences: Vec<String>,
}

/// Collects the reports of all ranks, tells them what came of it, and waits until they have read it.
fn decide(
    store: &dyn Store,
    meeting: &Meeting<'_>,
    own: &Configuration,
    remaining: &dyn Fn() -> Duration,
) -> Result<Verdict, StoreError> {
    store.set(&meeting.key("reference", 0), &own.encode())?;
    let mut reports = BTreeMap::new();
    let mut missing = Vec::new();
    // With another number of ranks, those that rank 0 waits for may not exist.
    let mut has_other_size = false;
    for rank in 1..meeting.world_size.get() {
        let timeout = if has_other_size { Duration::ZERO } else { remaining() };
        match store.get(&meeting.key("report", rank), timeout) {
            Ok(bytes) => {
                let report = decode_report(&bytes).ok_or_else(|| meeting.foreign("report"))?;
                has_other_size |= report.contains_key(WORLD_SIZE);
                reports.insert(rank, report);
            }
            Err(StoreError::Timeout { .. }) => missing.push(rank),
            Err(error) => return Err(error),
        }
    }
    if has_other_size {
        missing.clear();
    }
    let readers: Vec<String> = reports.keys().map(|&rank| meeting.key("read", rank)).collect();
    let mut differences = describe(own, &reports);
    for rank in 0..meeting.world_size.get() {
        if store.add(&meeting.key("count", rank), 0)? > 1 {
            differences.push(several_processes(rank));
        }
    }
    let verdict = Verdict { missing, differences };
    store.set(&meeting.key("verdict", 0), &verdict.encode())?;
    let readers: Vec<&str> = readers.iter().map(String::as_str).collect();
    match store.wait(&readers, remaining().max(READING)) {
        // Who has given up by now does not read it.
        Ok(()) | Err(StoreError::Timeout { .. }) => Ok(verdict),
        Err(error) => Err(error),
    }
}

/// The ranks that have not reported; if all have, rank 0 itself has not said anything.
fn who_is_missing(store: &dyn Store, meeting: &Meeting<'_>) -> Result<Vec<usize>, StoreError> {
    let ranks = 1..meeting.world_size.get();
    let keys: Vec<String> = ranks.clone().map(|rank| meeting.key("report", rank)).collect();
    let names: Vec<&str> = keys.iter().map(String::as_str).collect();
    match store.wait(&names, Duration::ZERO) {
        Ok(()) => Ok(vec![0]),
        Err(StoreError::Timeout { keys: missing, .. }) => {
            Ok(ranks.zip(&keys).filter(|(_, key)| missing.contains(key)).map(|(rank, _)| rank).collect())
        }
        Err(error) => Err(error),
    }
}

impl<'a> Meeting<'a> {
    /// The place of a process that was launched.
    pub fn new(name: &'a str, config: &LaunchConfig, timeout: Duration) -> Self {
        Self { name, rank: config.rank(), world_size: config.world_size(), timeout }
    }

    fn key(&self, what: &str, rank: usize) -> String {
        format!("rendezvous/{}/{what}/{rank}", self.name)
    }

    fn result(&self, verdict: Verdict, start: Instant) -> Result<(), StoreError> {
        let Verdict { missing, mut differences } = verdict;
        match (missing.is_empty(), differences.is_empty()) {
            (true, true) => Ok(()),
            (false, true) => Err(self.missing(missing, start)),
            (true, false) => Err(self.disagreement(differences)),
            (false, false) => {
                differences.push(format!("{} did not come", named(&missing)));
                Err(self.disagreement(differences))
            }
        }
    }

    fn missing(&self, missing: Vec<usize>, start: Instant) -> StoreError {
        StoreError::RanksMissing {
            rank: self.rank,
            world_size: self.world_size.get(),
            name: self.name.into(),
            waited: start.elapsed(),
            missing,
        }
    }

    fn disagreement(&self, differences: Vec<String>) -> StoreError {
        StoreError::Disagreement {
            rank: self.rank,
            world_size: self.world_size.get(),
            name: self.name.into(),
            differences,
        }
    }

    fn foreign(&self, what: &str) -> StoreError {
        self.disagreement(vec![format!("key {:?} holds what no rank of this version writes", self.key(what, 0))])
    }
}

fn several_processes(rank: usize) -> String {
    format!("rank {rank} is the rank of several processes, or met under this name before")
}

/// One line per setting: the reference's value, and each other value with its ranks.
fn describe(reference: &Configuration, reports: &BTreeMap<usize, BTreeMap<String, Option<String>>>) -> Vec<String> {
    let mut by_name: BTreeMap<&str, BTreeMap<Option<&str>, Vec<usize>>> = BTreeMap::new();
    for (&rank, report) in reports {
        for (name, value) in report {
            by_name.entry(name).or_default().entry(value.as_deref()).or_default().push(rank);
        }
    }
    let shown = |value: Option<&str>| value.map_or("not given".into(), |value| format!("{value:?}"));
    let line = |(name, values): (&str, BTreeMap<Option<&str>, Vec<usize>>)| {
        let mut line = format!("{name} is {} on rank 0", shown(reference.entries.get(name).map(String::as_str)));
        for (value, ranks) in values {
            line += &format!(", {} on {}", shown(value), named(&ranks));
        }
        line
    };
    by_name.into_iter().map(line).collect()
}

fn named(ranks: &[usize]) -> String {
    match ranks {
        [rank] => format!("rank {rank}"),
        ranks => format!("ranks {ranks:?}"),
    }
}

fn encode_report(report: &BTreeMap<String, Option<String>>) -> Vec<u8> {
    let value = |value: &Option<String>| value.as_ref().map_or(String::new(), |value| format!("={value}"));
    let texts: Vec<String> = report.iter().flat_map(|(name, own)| [name.clone(), value(own)]).collect();
    encode(texts.iter().map(String::as_str))
}

fn decode_report(bytes: &[u8]) -> Option<BTreeMap<String, Option<String>>> {
    let value = |text: String| text.strip_prefix('=').map(str::to_owned);
    Some(decode_pairs(bytes)?.into_iter().map(|(name, text)| (name, value(text))).collect())
}

impl Verdict {
    fn encode(&self) -> Vec<u8> {
        let missing: Vec<String> = self.missing.iter().map(usize::to_string).collect();
        encode([missing.join(",").as_str()].into_iter().chain(self.differences.iter().map(String::as_str)))
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let mut texts = decode(bytes)?.into_iter();
        let missing = texts.next()?;
        let missing = missing.split(',').filter(|rank| !rank.is_empty()).map(|rank| rank.parse().ok());
        Some(Self { missing: missing.collect::<Option<_>>()?, differences: texts.collect() })
    }
}

/// Texts, each behind its length in decimal digits and a colon.
fn encode<'a>(texts: impl IntoIterator<Item = &'a str>) -> Vec<u8> {
    texts.into_iter().flat_map(|text| format!("{}:{text}", text.len()).into_bytes()).collect()
}

fn decode(bytes: &[u8]) -> Option<Vec<String>> {
    let mut rest = std::str::from_utf8(bytes).ok()?;
    let mut texts = Vec::new();
    while !rest.is_empty() {
        let (num_bytes, behind) = rest.split_once(':')?;
        let (text, behind) = behind.split_at_checked(num_bytes.parse().ok()?)?;
        texts.push(text.to_owned());
        rest = behind;
    }
    Some(texts)
}

/// Names with values; nothing if one of them has none.
fn decode_pairs(bytes: &[u8]) -> Option<Vec<(String, String)>> {
    let mut texts = decode(bytes)?.into_iter();
    let mut pairs = Vec::new();
    while let Some(name) = texts.next() {
        pairs.push((name, texts.next()?));
    }
    Some(pairs)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn differences_are_grouped_by_setting_and_value() {
        let reference = Configuration::new().with("lr", 0.1).with("seed", 7);
        let of = |own: Configuration| own.differences_from(&reference);
        let other = Configuration::new().with("lr", 0.2).with("seed", 7).with("amp", true);
        let reports = BTreeMap::from([
            (1, of(reference.clone())),
            (2, of(other.clone())),
            (3, of(other)),
            (4, of(Configuration::new().with("lr", 0.1))),
        ]);
        let lines = describe(&reference, &reports);
        assert_eq!(
            lines,
            [
                r#"amp is not given on rank 0, "true" on ranks [2, 3]"#,
                r#"lr is "0.1" on rank 0, "0.2" on ranks [2, 3]"#,
                r#"seed is "7" on rank 0, not given on rank 4"#,
            ]
        );
    }

    #[test]
    fn a_long_value_is_compared_by_its_fingerprint() {
        let text = "x".repeat(100_000);
        let one = Configuration::new().with("config", &text);
        let other = Configuration::new().with("config", format!("y{}", &text[1..]));
        assert!(one.encode().len() < 400);
        assert_ne!(one, other);
        assert_ne!(one.fingerprint(), other.fingerprint());
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn what_is_encoded_is_decoded(
            entries: BTreeMap<String, String>,
            report: BTreeMap<String, Option<String>>,
            missing: Vec<usize>,
            differences: Vec<String>,
        ) {
            let configuration = Configuration { entries };
            prop_assert_eq!(Configuration::decode(&configuration.encode()), Some(configuration));
            prop_assert_eq!(decode_report(&encode_report(&report)), Some(report));
            let verdict = Verdict { missing, differences };
            prop_assert_eq!(Verdict::decode(&verdict.encode()), Some(verdict));
        }

        #[test]
        fn any_bytes_are_decoded_to_something_or_nothing(bytes: Vec<u8>, text: String) {
            for bytes in [&bytes, text.as_bytes()] {
                if let Some(texts) = decode(bytes) {
                    prop_assert!(texts.iter().map(String::len).sum::<usize>() <= bytes.len());
                }
                drop((Configuration::decode(bytes), decode_report(bytes), Verdict::decode(bytes)));
            }
        }
    }
}
