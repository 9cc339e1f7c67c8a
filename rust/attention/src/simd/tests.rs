//! Each vector unit against plain arithmetic, operation by operation. A unit that the machine lacks is skipped by name.

use super::portable::Portable;
use super::{Arithmetic, BLOCK, Simd, exp2, tanh};
use crate::element::{Brain, Byte, Element, Half, Single, Small};

/// The most lanes that a vector has.
const MOST_LANES: usize = 16;

const MOST_VALUES: usize = 2 * MOST_LANES;

/// Runs a check for every unit that is here.
macro_rules! for_each_unit {
    ($check:ident) => {{
        // SAFETY: every machine has it; the others are used only where they were detected.
        unsafe {
            $check(Portable::assume(), "portable");
            #[cfg(target_arch = "x86_64")]
            {
                use super::{avx2::Avx2, avx512::Avx512, avx512_bf16::Avx512Bf16};
                if Avx2::detect() {
                    $check(Avx2::assume(), "avx2")
                } else {
                    eprintln!("skipped: avx2")
                }
                if Avx512::detect() {
                    $check(Avx512::assume(), "avx512")
                } else {
                    eprintln!("skipped: avx512")
                }
                if Avx512Bf16::detect_bytes() {
                    $check(Avx512Bf16::assume(), "avx512_bf16")
                } else {
                    eprintln!("skipped: avx512_bf16, or it cannot look bytes up")
                }
            }
        }
    }};
}

fn lanes<S: Simd>(simd: S, a: S::Floats) -> Vec<f32> {
    let mut result = [f32::NAN; MOST_LANES];
    // SAFETY: there is room for the most lanes.
    unsafe { simd.store(result.as_mut_ptr(), a) };
    result[..S::LANES].to_vec()
}

fn vector<S: Simd>(simd: S, values: &[f32]) -> S::Floats {
    assert!(values.len() >= S::LANES);
    // SAFETY: there are as many as lanes.
    unsafe { simd.load(values.as_ptr()) }
}

/// Numbers of both signs, whole ones and halves among them.
fn numbers(seed: usize) -> Vec<f32> {
    (0..MOST_LANES)
        .map(|i| (((i * 37 + seed * 11) % 41) as f32 - 20.0) * 0.5 + (seed % 3) as f32 * 0.1)
        .collect()
}

fn same(found: &[f32], expected: impl IntoIterator<Item = f32>, what: &str) {
    let expected: Vec<f32> = expected.into_iter().take(found.len()).collect();
    let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(found), bits(&expected), "{what}: {found:?} is not {expected:?}");
}

#[test]
fn arithmetic_is_that_of_singles() {
    fn check<S: Simd>(simd: S, unit: &str) {
        for seed in 0..8 {
            let (a, b, c) = (numbers(seed), numbers(seed + 1), numbers(seed + 2));
            let (x, y, z) = (vector(simd, &a), vector(simd, &b), vector(simd, &c));
            let pairs = || a.iter().copied().zip(b.iter().copied());
            same(&lanes(simd, simd.splat(a[3])), [a[3]; MOST_LANES], unit);
            same(&lanes(simd, simd.add(x, y)), pairs().map(|(a, b)| a + b), unit);
            same(&lanes(simd, simd.sub(x, y)), pairs().map(|(a, b)| a - b), unit);
            same(&lanes(simd, simd.mul(x, y)), pairs().map(|(a, b)| a * b), unit);
            same(&lanes(simd, simd.div(x, y)), pairs().map(|(a, b)| a / b), unit);
            same(&lanes(simd, simd.max(x, y)), pairs().map(|(a, b)| if a > b { a } else { b }), unit);
            same(&lanes(simd, simd.min(x, y)), pairs().map(|(a, b)| if a < b { a } else { b }), unit);
            let [whole, rest] = simd.split(x).map(|parts| lanes(simd, parts));
            for ((whole, rest), a) in whole.into_iter().zip(rest).zip(&a) {
                assert_eq!((whole, rest), (a.round_ties_even(), a - a.round_ties_even()), "{unit}");
            }
            let largest = simd.maximum(x);
            assert!(simd.exceeds(x, largest.next_down()) && !simd.exceeds(x, largest), "{unit}");
            for (lane, found) in lanes(simd, simd.multiply_add(x, y, z)).into_iter().enumerate() {
                let (fused, plain) = (a[lane].mul_add(b[lane], c[lane]), a[lane] * b[lane] + c[lane]);
                assert!(found == fused || found == plain, "{unit}: {found} is neither {fused} nor {plain}");
            }
        }
    }
    for_each_unit!(check);
}

#[test]
fn the_second_counts_where_one_is_no_number() {
    fn check<S: Simd>(simd: S, unit: &str) {
        let (nan, one) = (simd.splat(f32::NAN), simd.splat(1.0));
        same(&lanes(simd, simd.max(nan, one)), [1.0; MOST_LANES], unit);
        same(&lanes(simd, simd.min(nan, one)), [1.0; MOST_LANES], unit);
        assert!(!simd.exceeds(nan, f32::NEG_INFINITY), "{unit}");
        assert!(lanes(simd, simd.max(one, nan)).iter().all(|lane| lane.is_nan()), "{unit}");
        assert!(lanes(simd, simd.min(one, nan)).iter().all(|lane| lane.is_nan()), "{unit}");
    }
    for_each_unit!(check);
}

#[test]
fn powers_of_two_scale() {
    fn check<S: Simd>(simd: S, unit: &str) {
        for exponent in -150..=128 {
            let found = simd.lane0(simd.scale(simd.splat(1.25), simd.splat(exponent as f32)));
            let expected = (1.25 * 2f64.powi(exponent)) as f32;
            let is_near =
                found == expected || (exponent < -126 && (0.0..=f32::MIN_POSITIVE).contains(&found));
            assert!(is_near, "{unit}: 1.25 * 2^{exponent} is {found}");
        }
    }
    for_each_unit!(check);
}

#[test]
fn lanes_outside_the_bounds_are_filled() {
    fn check<S: Simd>(simd: S, unit: &str) {
        let a = numbers(1);
        for first in -20..20 {
            for end in -20..20 {
                let kept = lanes(simd, simd.keep(vector(simd, &a), first, end, -7.0));
                let is_kept = |lane: usize| (first..end).contains(&(lane as i32));
                same(&kept, (0..S::LANES).map(|lane| if is_kept(lane) { a[lane] } else { -7.0 }), unit);
            }
        }
    }
    for_each_unit!(check);
}

#[test]
fn lanes_are_summed_and_compared() {
    fn check<S: Simd>(simd: S, unit: &str) {
        for seed in 0..8 {
            let a = numbers(seed);
            let x = vector(simd, &a);
            let exact: f64 = a[..S::LANES].iter().map(|&value| f64::from(value)).sum();
            assert!((f64::from(simd.sum(x)) - exact).abs() < 1e-4, "{unit}");
            assert_eq!(simd.maximum(x), a[..S::LANES].iter().copied().fold(f32::MIN, f32::max), "{unit}");
            assert_eq!(simd.lane0(x), a[0], "{unit}");
        }
    }
    for_each_unit!(check);
}

#[test]
fn exponentials_and_tangents_are_near_the_exact_ones() {
    fn check<S: Simd>(simd: S, unit: &str) {
        for step in -1520..=1270 {
            let x = step as f32 * 0.1;
            let (power, exact) = (simd.lane0(exp2(simd, simd.splat(x))), f64::from(x).exp2());
            let error = (f64::from(power) - exact).abs();
            assert!(error <= exact * 2.5e-7 + 1.2e-38, "{unit}: 2^{x} is {power}");
            let (bent, exact) = (simd.lane0(tanh(simd, simd.splat(x))), f64::from(x).tanh());
            assert!(
                (f64::from(bent) - exact).abs() <= exact.abs() * 1e-6,
                "{unit}: tanh {x} is {bent}, {:e} off",
                f64::from(bent) - exact
            );
        }
        let of = |x| simd.lane0(exp2(simd, simd.splat(x)));
        let bent = |x| simd.lane0(tanh(simd, simd.splat(x)));
        for x in [-150.5, -1e6, -3e38, f32::NEG_INFINITY] {
            assert_eq!((of(x), bent(x)), (0.0, -1.0), "{unit}");
        }
        for x in [129.0, 1e6, 3e38, f32::INFINITY] {
            assert_eq!((of(x), bent(x)), (f32::INFINITY, 1.0), "{unit}");
        }
        assert!(of(f32::NAN).is_nan() && bent(f32::NAN).is_nan(), "{unit}");
        assert_eq!(of(0.0), 1.0, "{unit}");
        for power in -30..-3 {
            let x = 1.7 * 2f32.powi(power);
            let exact = f64::from(x).tanh();
            assert!((f64::from(bent(x)) - exact).abs() <= exact * 1e-6, "{unit}: tanh {x} is {}", bent(x));
        }
    }
    for_each_unit!(check);
}

/// What the lanes hold, value by value: singles, or pairs of bf16.
fn values<A: Arithmetic>(arithmetic: A, a: A::Floats) -> Vec<f32> {
    lanes(arithmetic, a).into_iter().flat_map(|lane| packed::<A>(lane.to_bits())).collect()
}

fn packed<A: Arithmetic>(word: u32) -> Vec<f32> {
    match A::VALUES {
        1 => vec![f32::from_bits(word)],
        _ => [word as u16, (word >> 16) as u16].map(|bits| half::bf16::from_bits(bits).to_f32()).to_vec(),
    }
}

/// Bytes of a row of this format: every code of those of 8 bits comes up over some seeds, and no NaN of wider ones.
fn row<E: Element>(seed: usize) -> Vec<u8> {
    let bytes = E::FORMAT.bytes();
    (0..MOST_VALUES * bytes)
        .map(|i| {
            let byte = ((i / bytes) * 29 + seed * 17 + i % bytes * 91) as u8;
            if bytes > 1 && i % bytes == bytes - 1 { byte & 0xbf } else { byte }
        })
        .collect()
}

fn expected<E: Element>(row: &[u8], place: usize, count: usize) -> f32 {
    // SAFETY: the place lies in the row.
    if place < count { unsafe { E::read(row.as_ptr().add(place * E::FORMAT.bytes())) } } else { 0.0 }
}

/// Equal, or both not a number.
fn alike(found: &[f32], wanted: &[f32], what: &str) {
    let is_alike = |(a, b): (&f32, &f32)| a == b || (a.is_nan() && b.is_nan());
    assert!(
        found.len() == wanted.len() && found.iter().zip(wanted).all(is_alike),
        "{what}: {found:?}, {wanted:?}"
    );
}

fn check_loads<A: Arithmetic, E: Element>(arithmetic: A, unit: &str) {
    let wide = A::LANES * A::VALUES;
    for seed in 0..16 {
        let rows = [row::<E>(seed), row::<E>(seed + 100)];
        let pointers = [rows[0].as_ptr(), rows[1].as_ptr()];
        for count in 0..=wide {
            let what = format!("{unit}, {:?}, {count} values", E::FORMAT);
            // SAFETY: the rows hold the most values, the pointers as many rows as are asked for.
            let (loaded, step) = unsafe {
                (
                    arithmetic.load_two::<E>(pointers.as_ptr(), 0, count),
                    arithmetic.load_step::<E>(pointers.as_ptr(), 0, count),
                )
            };
            for (row, loaded) in rows.iter().zip(loaded) {
                let wanted: Vec<f32> = (0..wide).map(|place| expected::<E>(row, place, count)).collect();
                alike(&values(arithmetic, loaded), &wanted, &what);
            }
            for (vector, lanes) in step.as_ref().iter().enumerate() {
                let places = (0..A::LANES).map(|lane| vector * A::LANES + lane);
                let wanted: Vec<f32> = places
                    .flat_map(|place| {
                        rows[..A::VALUES].iter().map(move |row| expected::<E>(row, place, count))
                    })
                    .collect();
                alike(&values(arithmetic, *lanes), &wanted, &what);
            }
        }
    }
}

#[test]
fn rows_of_every_format_are_widened() {
    fn check<A: Arithmetic>(arithmetic: A, unit: &str) {
        if A::VALUES == 1 {
            check_loads::<A, Single>(arithmetic, unit);
            check_loads::<A, Half>(arithmetic, unit);
        }
        check_loads::<A, Brain>(arithmetic, unit);
        check_loads::<A, Byte>(arithmetic, unit);
        check_loads::<A, Small>(arithmetic, unit);
    }
    for_each_unit!(check);
}

fn check_every_byte<A: Arithmetic, E: Element>(arithmetic: A, unit: &str) {
    let bytes: Vec<u8> = (0..=u8::MAX).collect();
    let wide = A::LANES * A::VALUES;
    for first in (0..256).step_by(wide) {
        let pointers = [bytes.as_ptr(); 2];
        // SAFETY: the values `first..first + wide` exist.
        let loaded = unsafe { arithmetic.load_two::<E>(pointers.as_ptr(), first, wide) };
        let wanted: Vec<f32> = (first..first + wide).map(|place| expected::<E>(&bytes, place, 256)).collect();
        for loaded in loaded {
            alike(&values(arithmetic, loaded), &wanted, &format!("{unit}, {:?} from {first}", E::FORMAT));
        }
    }
}

#[test]
fn every_byte_is_widened() {
    fn check<A: Arithmetic>(arithmetic: A, unit: &str) {
        check_every_byte::<A, Byte>(arithmetic, unit);
        check_every_byte::<A, Small>(arithmetic, unit);
    }
    for_each_unit!(check);
}

#[test]
fn blocks_of_lanes_are_summed_transposed_and_repeated() {
    fn check<S: Simd>(simd: S, unit: &str) {
        let rows: [Vec<f32>; 4] =
            std::array::from_fn(|seed| numbers(seed).iter().map(|n| n.trunc()).collect());
        let vectors = std::array::from_fn(|row| vector(simd, &rows[row]));
        let block_of = |row: usize, block: usize| &rows[row][4 * block..][..4];
        let inside = (0..S::LANES).map(|lane| block_of(lane % 4, lane / 4).iter().sum());
        same(&lanes(simd, simd.sum_in_blocks(vectors)), inside, unit);
        let blocks = S::LANES / BLOCK;
        for (vector, found) in simd.transpose_blocks(vectors).into_iter().enumerate().take(blocks) {
            let wanted = (0..blocks).flat_map(|block| block_of(block, vector).to_vec());
            same(&lanes(simd, found), wanted, unit);
        }
        // SAFETY: there are more than four numbers.
        let repeated = unsafe { simd.repeat(rows[1].as_ptr()) };
        same(&lanes(simd, repeated), (0..S::LANES).map(|lane| rows[1][lane % BLOCK]), unit);
    }
    for_each_unit!(check);
}

#[test]
fn weights_are_stored_as_they_are_returned() {
    fn check<A: Arithmetic>(arithmetic: A, unit: &str) {
        for seed in 0..8 {
            let weights: Vec<f32> = numbers(seed).into_iter().map(|number| number.abs() / 21.3).collect();
            let mut words = [0u32; 2 * MOST_LANES];
            // SAFETY: the positions `LANES..2 * LANES` lie in the words.
            let counted = unsafe {
                arithmetic.store_weights(words.as_mut_ptr(), A::LANES, vector(arithmetic, &weights))
            };
            let stored: Vec<f32> = words.iter().flat_map(|&word| packed::<A>(word)).collect();
            let rounded = lanes(arithmetic, counted);
            same(&rounded, stored[A::LANES..2 * A::LANES].iter().copied(), unit);
            for (found, weight) in rounded.iter().zip(&weights) {
                let wanted = if A::VALUES == 1 { *weight } else { half::bf16::from_f32(*weight).to_f32() };
                assert_eq!(*found, wanted, "{unit}");
            }
        }
    }
    for_each_unit!(check);
}

#[test]
fn products_of_lanes_are_added() {
    fn check<A: Arithmetic>(arithmetic: A, unit: &str) {
        let rows = [row::<Byte>(3), row::<Byte>(4)];
        let pointers = [rows[0].as_ptr(), rows[1].as_ptr()];
        // SAFETY: the rows hold the most values.
        let [a, b] = unsafe { arithmetic.load_two::<Byte>(pointers.as_ptr(), 0, A::LANES * A::VALUES) };
        let (left, right) = (values(arithmetic, a), values(arithmetic, b));
        let found = lanes(arithmetic, arithmetic.accumulate(arithmetic.splat(0.5), a, b));
        for (lane, found) in found.into_iter().enumerate() {
            let places = lane * A::VALUES..(lane + 1) * A::VALUES;
            let wanted: f32 = places.map(|place| left[place] * right[place]).sum::<f32>() + 0.5;
            assert_eq!(found, wanted, "{unit}, lane {lane}");
        }
    }
    for_each_unit!(check);
}
