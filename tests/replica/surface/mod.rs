//! Every method of Burn's backend traits on members, against the plain backend: inputs in each placement, of each
//! dtype, on 1 to 4 members with equal and unequal shares.

#[macro_use]
mod case;

mod activation;
mod boolean;
mod compare;
mod empty;
mod faults;
mod float;
mod int;
mod module;
mod placing;
mod quantized;
mod report;
mod rules;
mod tables;
mod values;

use std::collections::BTreeSet;

use bonfire::{Placement, Replica, Shares, placement::PartialOp};
use burn::tensor::{DType, backend::Backend};
use burn_backend::ops::{FloatTensorOps, IntTensorOps};
use burn_flex::Flex;

use case::{Any, Case, Values, indices, main};
use compare::{Suite, Tally};
use placing::{Bench, Place};

/// The methods of Burn's traits, a line each, as `cargo xtask ops` found them in Burn's source.
const METHODS: &str = include_str!("methods.txt");

/// # Panics
///
/// With all differences, if there is one.
fn assert_no_difference(tally: &Tally) {
    let Tally { cases, calls, failures } = tally;
    println!("{cases} cases, {calls} calls");
    assert!(failures.is_empty(), "{} of {calls} calls differ:\n{}", failures.len(), failures.join("\n"));
    assert!(calls > cases);
}

macro_rules! suite {
    ($($test:ident: $module:ident;)+) => {
        $(
            #[test]
            fn $test() {
                assert_no_difference(&Suite::new($module::cases(), $module::cases()).run());
            }
        )+

        fn all_cases<B: Backend>() -> Vec<Case<B>> {
            [$($module::cases()),+].into_iter().flatten().collect()
        }
    };
}

suite! {
    methods_of_float_tensors_give_what_one_device_gives: float;
    methods_of_int_tensors_give_what_one_device_gives: int;
    methods_of_bool_tensors_give_what_one_device_gives: boolean;
    module_operations_give_what_one_device_gives: module;
    activations_give_what_one_device_gives: activation;
    quantized_tensors_and_transactions_give_what_one_device_gives: quantized;
}

#[test]
fn methods_of_empty_tensors_give_what_one_device_gives() {
    assert_no_difference(&Suite::new(empty::cases(all_cases()), empty::cases(all_cases())).run());
}

#[test]
fn every_method_has_a_case_and_every_case_a_method() {
    let methods: BTreeSet<&str> = METHODS.lines().filter_map(|line| line.split_whitespace().nth(1)).collect();
    let cases: BTreeSet<&str> = all_cases::<Flex>().iter().map(|case| case.method).collect();
    let without: Vec<_> = methods.difference(&cases).collect();
    let unknown: Vec<_> = cases.difference(&methods).collect();
    assert!(without.is_empty(), "without a case: {without:?}; list one in tests/replica/surface");
    assert!(unknown.is_empty(), "no methods of Burn: {unknown:?}");
    assert!(methods.len() > 400);
}

#[test]
fn the_table_of_operations_says_what_they_do() {
    report::check(&report::page());
}

/// The gradient of what was picked: no collective before an optimizer asks for the sum.
#[test]
fn what_is_added_to_zeros_is_added_up_by_each_member_apart() {
    type B = Replica<Flex>;
    let bench = Bench::new(3, Shares::Equal);
    let before = bench.device.collectives().tally();
    let place = |input: &case::Input, dtype, place| bench.place(input, dtype, place);
    for (dtype, is_in_parts) in [(DType::F32, true), (DType::F16, false)] {
        let Any::Float(zeros) = place(&main([5, 3], Values::Mixed), dtype, Place::Zeros) else { panic!("floats") };
        let Any::Float(grad) = place(&main([7, 3], Values::Mixed), dtype, Place::Shard(0)) else { panic!("floats") };
        let Any::Int(rows) = place(&indices([7], 5), dtype, Place::Shard(0)) else { panic!("ints") };
        let Any::Int(spots) = place(&indices([7, 3], 5), dtype, Place::Local) else { panic!("ints") };
        let selected = B::float_select_add(zeros.clone(), 0, rows.clone(), grad.clone());
        let scattered = B::float_scatter_add(0, zeros, spots, grad);
        for tensor in [selected, scattered] {
            let found = tensor.placement().clone();
            assert_eq!(found == Placement::Partial { op: PartialOp::Sum }, is_in_parts, "{dtype:?}: {found}");
        }
        if is_in_parts {
            B::sync(&bench.device).unwrap();
            assert_eq!((bench.device.collectives().tally() - before).to_string(), "nothing");
        }
        // Indices stay shared out while they pick.
        let picked = B::int_select(B::int_arange(0..5, &bench.device, burn::tensor::IntDType::I64), 0, rows);
        assert_eq!(*picked.placement(), Placement::shard(0, [3, 2, 2]));
    }
}
