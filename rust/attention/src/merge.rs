//! Results of parts of a row's keys: how two are merged, and how the last one becomes the output.

use crate::view::Format;

/// The result of a part: weights relative to `2^maximum`, their sum, and the weighted sum of the values.
pub(crate) struct Part<'a> {
    /// The largest score, in powers of two.
    pub(crate) maximum: &'a mut f32,
    /// The sum of the weights; 0 where the row sees nothing of the part.
    pub(crate) total: &'a mut f32,
    /// The weighted sum of the values.
    pub(crate) sums: &'a mut [f32],
}

impl Part<'_> {
    /// Makes this the part of no keys.
    pub(crate) fn clear(&mut self) {
        *self.maximum = f32::NEG_INFINITY;
        *self.total = 0.0;
        self.sums.fill(0.0);
    }

    /// Makes this the same as another part.
    pub(crate) fn copy(&mut self, other: &Part) {
        *self.maximum = *other.maximum;
        *self.total = *other.total;
        self.sums.copy_from_slice(other.sums);
    }

    /// Adds the part to the right of this one.
    pub(crate) fn merge(&mut self, right: &Part) {
        if *right.total == 0.0 {
            return;
        }
        if *self.total == 0.0 {
            return self.copy(right);
        }
        let maximum = self.maximum.max(*right.maximum);
        let mine = (*self.maximum - maximum).exp2();
        let other = (*right.maximum - maximum).exp2();
        *self.maximum = maximum;
        *self.total = *self.total * mine + *right.total * other;
        for (sum, right) in self.sums.iter_mut().zip(right.sums.iter()) {
            *sum = *sum * mine + right * other;
        }
    }

    /// Lets a sink take its share: a score without a value.
    pub(crate) fn add_sink(&mut self, sink: f32) {
        if *self.total == 0.0 {
            return;
        }
        let sink = sink * std::f32::consts::LOG2_E;
        let maximum = self.maximum.max(sink);
        let mine = (*self.maximum - maximum).exp2();
        *self.maximum = maximum;
        *self.total = *self.total * mine + (sink - maximum).exp2();
        for sum in self.sums.iter_mut() {
            *sum *= mine;
        }
    }

    /// The natural logarithm of the sum of the exponentials of the scores.
    pub(crate) fn log_sum_exp(&self) -> f32 {
        if *self.total == 0.0 {
            f32::NEG_INFINITY
        } else {
            (*self.maximum + self.total.log2()) * std::f32::consts::LN_2
        }
    }

    /// Writes the values' weighted mean, times `value_scale`.
    ///
    /// # Safety
    /// `num_values` numbers of the format can be written at `to`, and the part has as many.
    pub(crate) unsafe fn write_mean(&self, num_values: usize, value_scale: f32, format: Format, to: *mut u8) {
        let factor = if *self.total == 0.0 { 0.0 } else { value_scale / *self.total };
        let means = self.sums[..num_values].iter().map(|sum| sum * factor);
        for (index, mean) in means.enumerate() {
            // SAFETY: number `index` can be written; the writes may be unaligned.
            unsafe {
                match format {
                    Format::F32 => to.cast::<f32>().add(index).write_unaligned(mean),
                    Format::Bf16 => {
                        to.cast::<u16>().add(index).write_unaligned(half::bf16::from_f32(mean).to_bits())
                    }
                    Format::F16 => {
                        to.cast::<u16>().add(index).write_unaligned(half::f16::from_f32(mean).to_bits())
                    }
                    Format::Int8 | Format::Fp8 => unreachable!("outputs have no scales"),
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part<'a>(numbers: &'a mut (f32, f32), sums: &'a mut [f32]) -> Part<'a> {
        Part { maximum: &mut numbers.0, total: &mut numbers.1, sums }
    }

    #[test]
    fn merging_with_nothing_changes_no_bit() {
        let (mut numbers, mut sums) = ((0.3, 1.7), [0.1, -2.0]);
        let (mut none, mut zeros) = ((f32::NEG_INFINITY, 0.0), [0.0, 0.0]);
        part(&mut numbers, &mut sums).merge(&part(&mut none, &mut zeros));
        assert_eq!((numbers, sums), ((0.3, 1.7), [0.1, -2.0]));
        part(&mut none, &mut zeros).merge(&part(&mut numbers, &mut sums));
        assert_eq!((none, zeros), ((0.3, 1.7), [0.1, -2.0]));
    }

    #[test]
    fn merging_weighs_by_the_maxima() {
        let (mut left, mut left_sums) = ((0.0, 1.0), [1.0]);
        let (mut right, mut right_sums) = ((1.0, 1.0), [3.0]);
        part(&mut left, &mut left_sums).merge(&part(&mut right, &mut right_sums));
        assert_eq!((left, left_sums), ((1.0, 1.5), [3.5]));
    }

    #[test]
    fn a_sink_takes_weight_and_adds_nothing() {
        let (mut numbers, mut sums) = ((0.0, 1.0), [2.0]);
        let mut whole = part(&mut numbers, &mut sums);
        whole.add_sink(0.0);
        let mut mean = [0.0f32];
        // SAFETY: one single can be written.
        unsafe { whole.write_mean(1, 1.0, Format::F32, mean.as_mut_ptr().cast()) };
        assert_eq!(mean, [1.0]);
        assert!((whole.log_sum_exp() - 2f32.ln()).abs() < 1e-6);
    }

    #[test]
    fn a_row_without_keys_is_zero() {
        let (mut numbers, mut sums) = ((0.0, 1.0), [2.0]);
        let mut whole = part(&mut numbers, &mut sums);
        whole.clear();
        whole.add_sink(3.0);
        let mut mean = [7u16];
        // SAFETY: one half can be written.
        unsafe { whole.write_mean(1, 1.0, Format::F16, mean.as_mut_ptr().cast()) };
        assert_eq!(mean, [0]);
        assert_eq!(whole.log_sum_exp(), f32::NEG_INFINITY);
    }
}
