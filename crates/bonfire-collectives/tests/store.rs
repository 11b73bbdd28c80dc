//! What any store must do, on a store of each kind, with one handle per rank.

use std::{
    num::NonZeroUsize,
    sync::Barrier,
    thread,
    time::{Duration, Instant},
};

use bonfire_collectives::{
    MAX_KEY_BYTES, MAX_STORE_BYTES, MAX_VALUE_BYTES, MemoryStore, Store, StoreError, TcpStore, Token,
};

/// No check comes near it.
const TIMEOUT: Duration = Duration::from_secs(20);
const SHORT: Duration = Duration::from_millis(60);

/// A handle for each rank; rank 0's is the host's.
type Ranks = Vec<Box<dyn Store>>;

fn memory(world_size: usize) -> Ranks {
    let store = MemoryStore::new();
    (0..world_size).map(|_| Box::new(store.clone()) as Box<dyn Store>).collect()
}

fn tcp(world_size: usize) -> Ranks {
    let token = Token::new("campfire").unwrap();
    let num_ranks = NonZeroUsize::new(world_size).unwrap();
    let host = TcpStore::host("127.0.0.1", 0, token.clone(), num_ranks).unwrap();
    let port = host.port();
    let mut ranks: Ranks = vec![Box::new(host)];
    for rank in 1..world_size {
        ranks.push(Box::new(TcpStore::connect("127.0.0.1", port, token.clone(), rank, TIMEOUT).unwrap()));
    }
    ranks
}

/// Runs a check on stores of each kind.
fn on_each(check: fn(&Ranks)) {
    for world_size in [1, 2, 4] {
        check(&memory(world_size));
        check(&tcp(world_size));
    }
}

/// Runs `body` as every rank at once.
fn run<R: Send>(ranks: &Ranks, body: impl Fn(usize, &dyn Store) -> R + Sync) -> Vec<R> {
    let body = &body;
    thread::scope(|scope| {
        let start = |(rank, store)| scope.spawn(move || body(rank, store));
        let stores = ranks.iter().map(|store| &**store);
        let threads: Vec<_> = stores.enumerate().map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn what_one_rank_sets_every_rank_gets() {
    on_each(|ranks| {
        run(ranks, |rank, store| {
            store.set(&format!("key/{rank}"), &vec![rank as u8; 1000 * rank]).unwrap();
            for other in 0..ranks.len() {
                let value = store.get(&format!("key/{other}"), TIMEOUT).unwrap();
                assert_eq!(value, vec![other as u8; 1000 * other]);
            }
        });
    });
}

#[test]
fn a_later_value_replaces_an_earlier_one() {
    on_each(|ranks| {
        let (first, last) = (&ranks[0], &ranks[ranks.len() - 1]);
        first.set("key", b"one").unwrap();
        last.set("key", b"").unwrap();
        assert_eq!(first.get("key", TIMEOUT).unwrap(), b"");
        first.set("key", b"three").unwrap();
        assert_eq!(last.get("key", Duration::ZERO).unwrap(), b"three", "what is there needs no time");
    });
}

#[test]
fn any_text_is_a_key_and_any_bytes_are_a_value() {
    on_each(|ranks| {
        let bytes: Vec<u8> = (0..=255).collect();
        for key in ["", " ", "a/b", "π", "\0", &"k".repeat(MAX_KEY_BYTES)] {
            ranks[ranks.len() - 1].set(key, &bytes).unwrap();
            assert_eq!(ranks[0].get(key, TIMEOUT).unwrap(), bytes);
        }
        let large = vec![7; MAX_VALUE_BYTES];
        ranks[ranks.len() - 1].set("large", &large).unwrap();
        for store in ranks {
            assert_eq!(store.get("large", TIMEOUT).unwrap(), large);
        }
    });
}

#[test]
fn every_add_gives_a_sum_of_its_own() {
    on_each(|ranks| {
        const NUM_ADDS: usize = 50;
        let sums = run(ranks, |_, store| (0..NUM_ADDS).map(|_| store.add("count", 1).unwrap()).collect::<Vec<_>>());
        let mut sums = sums.concat();
        sums.sort_unstable();
        let total = (NUM_ADDS * ranks.len()) as i64;
        assert_eq!(sums, (1..=total).collect::<Vec<_>>());
        assert_eq!(ranks[0].add("count", -2 * total).unwrap(), -total);
        assert_eq!(ranks[0].get("count", TIMEOUT).unwrap(), format!("-{total}").into_bytes());
    });
}

#[test]
fn what_is_no_number_is_not_added_to_and_stays() {
    on_each(|ranks| {
        let store = &ranks[ranks.len() - 1];
        store.set("text", b"abc").unwrap();
        let message = store.add("text", 1).unwrap_err().to_string();
        assert!(message.contains("\"text\"") && message.contains("no number"), "{message}");
        assert_eq!(store.get("text", TIMEOUT).unwrap(), b"abc");
        assert_eq!(store.add("sum", i64::MAX).unwrap(), i64::MAX);
        let error = store.add("sum", 1).unwrap_err();
        assert!(matches!(&error, StoreError::NotANumber { key, .. } if key == "sum"), "{error}");
        assert_eq!(store.add("sum", 0).unwrap(), i64::MAX);
        store.set("digits", b"41").unwrap();
        assert_eq!(store.add("digits", 1).unwrap(), 42);
    });
}

#[test]
fn who_waits_is_woken_by_who_sets() {
    on_each(|ranks| {
        let keys: Vec<String> = (0..ranks.len()).map(|rank| format!("here/{rank}")).collect();
        let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
        let start = Barrier::new(ranks.len());
        run(ranks, |rank, store| {
            start.wait();
            // The last one late, so that the others do wait.
            thread::sleep(if rank == ranks.len() - 1 { SHORT } else { Duration::ZERO });
            store.set(keys[rank], b"").unwrap();
            store.wait(&keys, TIMEOUT).unwrap();
            store.wait(&[], Duration::ZERO).unwrap();
        });
    });
}

#[test]
fn a_timeout_names_the_keys_that_are_missing_and_leaves_the_store_usable() {
    on_each(|ranks| {
        let errors = run(ranks, |_, store| {
            store.set("there", b"").unwrap();
            let start = Instant::now();
            let get = store.get("nowhere", SHORT).unwrap_err();
            let wait = store.wait(&["gone", "there", "lost"], SHORT).unwrap_err();
            assert!(start.elapsed() >= 2 * SHORT);
            assert!(start.elapsed() < TIMEOUT);
            store.wait(&["there"], Duration::ZERO).unwrap();
            [get, wait]
        });
        for [get, wait] in errors {
            let keys = |error: &StoreError| match error {
                StoreError::Timeout { keys, absent, waited } => {
                    assert!(absent.is_empty() && *waited >= SHORT, "{error}");
                    keys.clone()
                }
                other => panic!("{other}"),
            };
            assert_eq!(keys(&get), ["nowhere"]);
            assert_eq!(keys(&wait), ["gone", "lost"]);
            let message = wait.to_string();
            assert!(message.contains(r#"keys ["gone", "lost"]"#) && message.contains("timeout"), "{message}");
        }
    });
}

#[test]
fn a_rank_that_waits_in_one_thread_can_set_in_another() {
    on_each(|ranks| {
        let store = &ranks[ranks.len() - 1];
        thread::scope(|scope| {
            let waits: Vec<_> = (0..3).map(|_| scope.spawn(|| store.get("late", TIMEOUT))).collect();
            thread::sleep(SHORT);
            store.set("late", b"now").unwrap();
            for wait in waits {
                assert_eq!(wait.join().unwrap().unwrap(), b"now");
            }
        });
    });
}

#[test]
fn what_is_over_a_bound_is_refused_and_changes_nothing() {
    on_each(|ranks| {
        let store = &ranks[ranks.len() - 1];
        let key = "k".repeat(MAX_KEY_BYTES + 1);
        let refused = |result: Result<(), StoreError>, number: usize| {
            let error = result.unwrap_err();
            assert!(matches!(error, StoreError::TooLong { .. }), "{error}");
            assert!(error.to_string().contains(&number.to_string()), "{error}");
        };
        refused(store.set(&key, b""), MAX_KEY_BYTES);
        refused(store.get(&key, TIMEOUT).map(drop), MAX_KEY_BYTES);
        refused(store.add(&key, 1).map(drop), MAX_KEY_BYTES);
        refused(store.wait(&[&key], TIMEOUT), MAX_KEY_BYTES);
        refused(store.set("value", &vec![0; MAX_VALUE_BYTES + 1]), MAX_VALUE_BYTES);
        refused(store.wait(&vec!["key"; 1 << 17], TIMEOUT), 1 << 17);
        store.get("value", Duration::ZERO).unwrap_err();
    });
}

#[test]
fn a_full_store_says_so_and_replaces_values_all_the_same() {
    for ranks in [memory(2), tcp(2)] {
        let value = vec![0; MAX_VALUE_BYTES];
        let num_fitting = MAX_STORE_BYTES / MAX_VALUE_BYTES - 1;
        for index in 0..num_fitting {
            ranks[1].set(&index.to_string(), &value).unwrap();
        }
        let error = ranks[1].set("one more", &value).unwrap_err();
        assert_eq!(error, StoreError::Full { max_bytes: MAX_STORE_BYTES });
        ranks[1].set("0", b"small").unwrap();
        ranks[1].set("one more", &value).unwrap();
        assert_eq!(ranks[0].get("0", TIMEOUT).unwrap(), b"small");
    }
}
