//! Every method of Burn's backend traits on a member that fails in it.

use std::{collections::BTreeSet, time::Duration};

use bonfire::{Replica, ReplicaDevice, ReplicaOptions, Spread};
use burn::tensor::backend::Backend;

use super::{
    all_cases,
    case::{Args, Case, Expected},
    compare::outcome,
    placing::{Place, fresh},
};
use crate::{
    probe::{Fault, Probe, ProbeDevice, assert_nothing_lives},
    runs::draw_alone,
};

type B = Replica<Probe>;

/// Two members, on which every float, int and bool tensor is spread at once.
fn eager(devices: &[ProbeDevice]) -> ReplicaDevice<Probe> {
    let options =
        ReplicaOptions { spread: Spread::Eager, timeout: Duration::from_secs(20), ..ReplicaOptions::default() };
    ReplicaDevice::with_options(devices.to_vec(), options).unwrap()
}

/// Calls the method and reads its results; `set` is called once the inputs are where they belong.
fn call(case: &Case<B>, device: &ReplicaDevice<Probe>, elsewhere: &ReplicaDevice<Probe>, set: impl FnOnce()) {
    let dtype = case.spec.dtypes[0];
    let inputs = &case.spec.variants[0];
    let inputs = inputs.iter().map(|input| fresh::<B>(input, dtype, Place::Local, device)).collect();
    B::sync(device).unwrap();
    let mut args = Args { device: device.clone(), elsewhere: elsewhere.clone(), dtype, inputs };
    set();
    for result in (case.call)(&mut args) {
        result.data();
    }
    if let Err(error) = B::sync(device) {
        panic!("{error:?}");
    }
}

#[test]
fn a_member_may_fail_in_every_method() {
    let _alone = draw_alone();
    let devices = ProbeDevice::fresh(2);
    let elsewhere = eager(&ProbeDevice::fresh(1));
    let mut device = eager(&devices);
    let mut failed = BTreeSet::new();
    for case in all_cases::<B>().iter().filter(|case| case.spec.expected != Expected::Panic) {
        let mut recordings = Vec::new();
        call(case, &device, &elsewhere, || recordings.extend(devices.iter().map(|device| device.record())));
        let names: Vec<Vec<&str>> =
            recordings.into_iter().map(|it| it.take().iter().map(|record| record.name).collect()).collect();
        // What stays at home runs on the caller's thread, on the first member's device.
        let rank = if names[1].is_empty() { 0 } else { 1 };
        // What brings its inputs, the operation itself, and what comes after it.
        let own = names[rank].iter().position(|name| *name == case.method).unwrap_or(0);
        let last = names[rank].len().saturating_sub(1);
        for (index, fault) in [(0, Fault::OutOfMemory), (own, Fault::Panic), (last, Fault::OutOfMemory)] {
            let Some(name) = names[rank].get(index) else { continue };
            let context = format!("{} {}, {name} on member {rank}", case.method, case.spec.note);
            let result = outcome(|| call(case, &device, &elsewhere, || devices[rank].fail_at(index, fault)));
            let message = result.expect_err(&context);
            assert!(message.contains(fault.text()), "{context}: {message}");
            // Member 0's device is the caller's too: two threads, in no fixed order.
            assert!(rank == 0 || message.contains(&format!("{name} on ProbeDevice")), "{context}: {message}");
            assert!(rank == 0 || device.broken().is_some(), "{context}: {message}");
            devices[rank].heal();
            if device.broken().is_some() {
                device = eager(&devices);
            }
            assert_nothing_lives(&devices, &context);
            failed.insert(*name);
        }
    }
    // Some of each family, and most of all there are.
    for name in ["float_exp", "int_add", "bool_and", "conv2d", "interpolate", "attention", "softmax", "dequantize"] {
        assert!(failed.contains(name), "{name} is none of {failed:?}");
    }
    assert!(failed.len() > 250, "{} operations failed: {failed:?}", failed.len());
    assert!(elsewhere.broken().is_none());
}
