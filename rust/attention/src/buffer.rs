//! Scratch memory in whole cache lines, kept from call to call.

/// One cache line.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([f32; 16]);

/// 32-bit words, aligned to a cache line; zeros until they are written. Growing keeps nothing.
#[derive(Default)]
pub(crate) struct Buffer {
    lines: Vec<Line>,
}

impl Buffer {
    /// Makes room for `num_words`, whatever they hold.
    pub(crate) fn reserve(&mut self, num_words: usize) {
        let num_lines = num_words.div_ceil(16);
        if self.lines.len() < num_lines {
            self.lines.clear();
            self.lines.resize(num_lines, Line([0.0; 16]));
        }
    }

    /// Where the words start.
    pub(crate) fn words(&mut self) -> *mut u32 {
        self.lines.as_mut_ptr().cast()
    }

    /// Where the words start, as singles.
    pub(crate) fn floats(&mut self) -> *mut f32 {
        self.lines.as_mut_ptr().cast()
    }

    /// All the words, as singles.
    pub(crate) fn as_floats(&mut self) -> &mut [f32] {
        // SAFETY: a line is 16 singles and nothing else, so lines in a row are singles in a row.
        unsafe { std::slice::from_raw_parts_mut(self.floats(), self.lines.len() * 16) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn is_aligned_and_never_shrinks() {
        let mut buffer = Buffer::default();
        buffer.reserve(17);
        assert_eq!(buffer.as_floats(), [0.0; 32]);
        assert_eq!(buffer.words() as usize % 64, 0);
        buffer.reserve(3);
        assert_eq!(buffer.as_floats().len(), 32);
    }

    #[test]
    fn words_and_singles_are_the_same_memory() {
        let mut buffer = Buffer::default();
        buffer.reserve(1);
        // SAFETY: the buffer holds sixteen words.
        unsafe { buffer.words().add(15).write(1f32.to_bits()) };
        assert_eq!(buffer.as_floats()[15], 1.0);
    }
}
