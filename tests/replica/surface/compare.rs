//! Runs a case on the plain backend and on members, and says where they differ.

use std::{
    collections::HashMap,
    panic::{AssertUnwindSafe, catch_unwind},
};

use bonfire::{Replica, Shares};
use burn::tensor::{BoolStore, DType, TensorData};
use burn_flex::{Flex, FlexDevice};

use super::{
    case::{Any, Args, Case, Expected, Input},
    placing::{Bench, Place, fresh, places},
};
use crate::runs::draw_alone;

type Ours = Replica<Flex>;

/// Replicas of 1 to 4 members, equal and unequal, two of them with members that never get a share.
const GROUPS: [(usize, Option<[u32; 3]>); 6] =
    [(2, None), (3, Some([3, 0, 1])), (4, None), (1, None), (3, Some([1, 2, 4])), (3, Some([0, 1, 0]))];

/// Choices of placements per case and group: all of them, up to so many.
const MAX_CHOICES: usize = 96;

/// What is compared how often.
#[derive(Debug, Default)]
pub struct Tally {
    pub cases: usize,
    pub calls: usize,
    pub failures: Vec<String>,
}

/// The same cases, called on either backend.
pub struct Suite {
    theirs: Vec<Case<Flex>>,
    ours: Vec<Case<Ours>>,
}

impl Suite {
    pub fn new(theirs: Vec<Case<Flex>>, ours: Vec<Case<Ours>>) -> Self {
        assert_eq!(theirs.len(), ours.len());
        Self { theirs, ours }
    }

    pub fn run(&self) -> Tally {
        let mut tally = Tally::default();
        let mut groups: Vec<Group> = GROUPS.iter().map(|&(num, weights)| Group::new(num, weights)).collect();
        for (theirs, ours) in self.theirs.iter().zip(&self.ours) {
            let _alone = (ours.spec.expected == Expected::Drawn).then(draw_alone);
            Comparison { theirs, ours, references: HashMap::new(), tally: &mut tally }.run(&mut groups);
        }
        tally
    }
}

/// A replica that is made anew after it broke.
struct Group {
    num_members: usize,
    weights: Option<[u32; 3]>,
    bench: Bench,
    elsewhere: Bench,
}

impl Group {
    fn new(num_members: usize, weights: Option<[u32; 3]>) -> Self {
        let shares = weights.map_or(Shares::Equal, |weights| Shares::Weighted(weights.into()));
        let elsewhere = Bench::new(num_members % 3 + 1, Shares::Equal);
        Self { num_members, weights, bench: Bench::new(num_members, shares), elsewhere }
    }
}

/// What the plain backend's results depend on: the variant, the dtype, and which inputs are constant.
type Reference = (usize, DType, Vec<Option<Place>>);

struct Comparison<'a> {
    theirs: &'a Case<Flex>,
    ours: &'a Case<Ours>,
    references: HashMap<Reference, Result<Vec<TensorData>, String>>,
    tally: &'a mut Tally,
}

impl Comparison<'_> {
    fn run(mut self, groups: &mut [Group]) {
        self.tally.cases += 1;
        let spec = &self.ours.spec;
        for (variant, inputs) in spec.variants.iter().enumerate() {
            for (nth_dtype, &dtype) in spec.dtypes.iter().enumerate() {
                for (nth_group, group) in groups.iter_mut().enumerate() {
                    // All combinations for one dtype and one choice of shapes; fewer for the others.
                    let most = match (variant, nth_dtype, nth_group) {
                        // Each of them breaks a replica.
                        (_, _, nth) if spec.expected == Expected::Panic => 4 * usize::from(nth == 0),
                        _ if spec.expected == Expected::Any => 6,
                        (0, 0, _) => MAX_CHOICES,
                        (_, 0, _) => MAX_CHOICES / 4,
                        (0, _, _) => 12,
                        (_, _, 1) => 6,
                        _ => 2,
                    };
                    for (nth, choice) in choices(inputs, dtype, most).iter().enumerate() {
                        // Others may hold the inputs too, which must stay as they are then.
                        let is_kept = nth % 3 == 0;
                        self.tally.calls += 1;
                        let compared = self.compare(group, variant, dtype, choice, is_kept);
                        if compared.is_err() || group.bench.device.broken().is_some() {
                            *group = Group::new(group.num_members, group.weights);
                        }
                        if let Err(difference) = compared {
                            let Case { method, spec, .. } = self.ours;
                            let shapes: Vec<&[usize]> = inputs.iter().map(|input| &input.shape[..]).collect();
                            self.tally.failures.push(format!(
                                "{method} {} of {shapes:?} {dtype:?} placed {choice:?} on {} members{}: {difference}",
                                spec.note,
                                group.num_members,
                                if is_kept { ", inputs kept" } else { "" },
                            ));
                            // One of a kind tells enough.
                            break;
                        }
                    }
                }
            }
        }
    }

    fn compare(
        &mut self,
        group: &Group,
        variant: usize,
        dtype: DType,
        choice: &[Place],
        is_kept: bool,
    ) -> Result<(), String> {
        let Case { spec, call, .. } = self.ours;
        let inputs = &spec.variants[variant];
        let constants = choice.iter().map(|place| place.is_constant().then_some(*place)).collect();
        let theirs = self.theirs;
        let reference = self.references.entry((variant, dtype, constants)).or_insert_with(|| {
            let inputs = inputs.iter().zip(choice);
            outcome(|| {
                let fresh = inputs.map(|(input, &place)| fresh::<Flex>(input, dtype, place, &FlexDevice)).collect();
                let mut args = Args { device: FlexDevice, elsewhere: FlexDevice, dtype, inputs: fresh };
                (theirs.call)(&mut args).into_iter().map(Any::data).collect()
            })
        });

        if spec.expected == Expected::Any && reference.is_err() {
            return Ok(());
        }
        let found = outcome(|| {
            let placed: Vec<Any<Ours>> =
                inputs.iter().zip(choice).map(|(input, &place)| group.bench.place(input, dtype, place)).collect();
            let kept = if is_kept { placed.clone() } else { Vec::new() };
            let mut args = Args {
                device: group.bench.device.clone(),
                elsewhere: group.elsewhere.device.clone(),
                dtype,
                inputs: placed.into(),
            };
            let results: Vec<TensorData> = call(&mut args)
                .into_iter()
                .map(|result| {
                    let told = result.told();
                    let data = result.data();
                    assert_eq!(told.0, data.shape, "told before it was read, and read");
                    assert!(
                        is_same_dtype(told.1, data.dtype),
                        "{:?} when it was read, {:?} before",
                        data.dtype,
                        told.1
                    );
                    data
                })
                .collect();
            for (index, kept) in kept.into_iter().enumerate() {
                let now = kept.data();
                let before = fresh::<Flex>(&inputs[index], dtype, choice[index], &FlexDevice).data();
                difference(&now, &before, 0.0).map_or(Ok(()), Err).expect("an input is unchanged");
            }
            results
        });

        match (reference, found, spec.expected) {
            (Ok(expected), Ok(found), Expected::Result | Expected::Drawn | Expected::Any) => {
                same(&found, expected, spec.tolerance)
            }
            (Err(_), Err(_), Expected::Panic) => Ok(()),
            (Ok(_), _, Expected::Panic) => Err("the plain backend has a result: expect it".into()),
            (Err(_), Ok(_), Expected::Panic) => Err("has a result where the plain backend panics".into()),
            (Err(message), ..) => Err(format!("the plain backend panics: {message}")),
            (_, Err(message), _) => Err(format!("panics: {message}")),
        }
    }
}

/// What `call` gives, or the message of its panic.
pub fn outcome<R>(call: impl FnOnce() -> R) -> Result<R, String> {
    catch_unwind(AssertUnwindSafe(call)).map_err(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        text.or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string)).unwrap_or_default()
    })
}

/// Placements of all inputs: every combination, or `most` of them, the same ones each time.
fn choices(inputs: &[Input], dtype: DType, most: usize) -> Vec<Vec<Place>> {
    let places: Vec<Vec<Place>> = inputs.iter().map(|input| places(input, dtype)).collect();
    let num: usize = places.iter().map(Vec::len).product();
    let nth = |mut index: usize| {
        let mut choice = Vec::new();
        for places in &places {
            choice.push(places[index % places.len()]);
            index /= places.len();
        }
        choice
    };
    if num <= most {
        return (0..num).map(nth).collect();
    }
    // A stride without a common factor comes by every combination, and by all places of each input soon.
    let stride = (num * 5 / 8..).find(|&stride| gcd(stride, num) == 1).unwrap_or(1);
    (0..most).map(|step| nth(step * stride % num)).collect()
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

fn same(found: &[TensorData], expected: &[TensorData], tolerance: f64) -> Result<(), String> {
    if found.len() != expected.len() {
        return Err(format!("{} results instead of {}", found.len(), expected.len()));
    }
    let mut differences =
        found.iter().zip(expected).filter_map(|(found, expected)| difference(found, expected, tolerance));
    differences.next().map_or(Ok(()), Err)
}

/// Flex calls the result of indexing a bool tensor a tensor of bytes, which members do not.
fn is_same_dtype(found: DType, expected: DType) -> bool {
    let is_byte = |dtype| matches!(dtype, DType::Bool(BoolStore::Native | BoolStore::U8) | DType::U8);
    found == expected || matches!(found, DType::Bool(_)) && is_byte(found) && is_byte(expected)
}

/// How `found` is not what was expected.
fn difference(found: &TensorData, expected: &TensorData, tolerance: f64) -> Option<String> {
    if found.shape != expected.shape || !is_same_dtype(found.dtype, expected.dtype) {
        let told = |data: &TensorData| format!("{:?} {:?}", data.shape, data.dtype);
        return Some(format!("{} instead of {}", told(found), told(expected)));
    }
    if found.bytes == expected.bytes {
        return None;
    }
    if matches!(found.dtype, DType::QFloat(_)) {
        return Some(format!("bytes {:?} instead of {:?}", &found.bytes[..], &expected.bytes[..]));
    }
    let epsilon = match found.dtype {
        DType::F64 => f64::EPSILON,
        DType::F32 | DType::Flex32 => f32::EPSILON.into(),
        DType::F16 => 2f64.powi(-10),
        DType::BF16 => 2f64.powi(-7),
        _ => 0.0,
    };
    let [ours, theirs] = [found, expected].map(|data| data.iter::<f64>().collect::<Vec<f64>>());
    let scale = theirs.iter().filter(|value| value.is_finite()).fold(1.0, |most: f64, value| most.max(value.abs()));
    let limit = tolerance * epsilon * scale;
    let is_close = |(a, b): (&f64, &f64)| a == b || a.is_nan() && b.is_nan() || (a - b).abs() <= limit;
    let index = ours.iter().zip(&theirs).position(|pair| !is_close(pair))?;
    let off = (ours[index] - theirs[index]).abs() / (epsilon * scale);
    Some(format!(
        "element {index} is {}, not {} ({off:.1} epsilon off): {ours:?} instead of {theirs:?}",
        ours[index], theirs[index]
    ))
}
