"""Texts on which tokenizers tend to differ from each other."""

from __future__ import annotations

HARD_TEXTS = [
    "",
    " ",
    "  ",
    "     ",
    "\n",
    "\n\n\n",
    "\t\ttabs\tbetween \t words\t",
    " leading and trailing ",
    "   three   spaces   between   words   ",
    "line one\nline two\r\nline three\r\n\r\n  indented\n\n\n\nfour newlines",
    "Hello, world! It's a test: don't we'll I'VE they'RE 'S'",
    "def f(x):\n    if x > 0:\n\t\treturn [i**2 for i in range(x)]  # comment\n    else:\n        raise ValueError(f'{x!r}')\n",
    "for (int i=0;i<10;++i){a[i]+=b[i]<<2;} /* ok */ #define X(y) ((y)&0xFF)",
    '{"key": [1, 2.5, -3e10, null, true], "nested": {"a\\"b": "\\u00e9"}}',
    "1 12 123 1234 12345678901234567890 3.14159 1,000,000 ½ ² Ⅷ ٣٤٥ १२३ 10:30",
    "v2.0.1-rc3+build5 0x1F 1e-9 50% $100 €99,99 #1",
    "café naïve Zürich Ångström façade — “quotes” ‘single’ … •",
    "cafe\u0301 e\u0301\u0302\u0303 n\u0303 a\u0308\u0323 Z\u0351\u036b\u0343a\u0334l\u0335g\u0336o",
    "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇩🇪🇯🇵 ❤️ 🤷🏻‍♀️ 😀😃",
    "你好，世界！今天天气怎么样？我们去吃饭吧。",
    "日本語のテキスト、カタカナ、ひらがな。東京タワー２０２４年",
    "한국어 텍스트입니다. 안녕하세요?",
    "ภาษาไทยไม่มีช่องว่างระหว่างคำ สวัสดีครับ",
    "مرحبا بالعالم، كيف حالك؟ الحَمْدُ لِلّٰهِ",
    "שלום עולם, מה שלומך? וְאָהַבְתָּ",
    "Привет, мир! Ёлка, объём, ѣ",
    "नमस्ते दुनिया क्षत्रिय ज्ञान",
    "Ελληνικά: Γειά σου Κόσμε ΑΒΓ άέή",
    "\u00a0non\u00a0breaking \u2003em\u2003space \u200bzero\u200bwidth \u3000ideographic",
    "\x00\x01\x07\x1b[31mred\x1b[0m\x7f",
    "\ufeffBOM first \ufffd replacement \U0010ffff last",
    "aaaaaaaaaaaaaaaaaaaaaaaa bbbbbbbbbbbb ---------- ========== ........ !!!!!!",
    "CamelCaseWordsAndSNAKE_CASE_and-kebab-case iPhone McDonald ǅ ﬁ",
    "https://example.org/path?q=a%20b&lang=en#frag user@mail.example",
    "\\frac{a}{b} \\sum_{i=0}^{n} x_i^2 \\to \\infty",
    '<div class="x">text</div> <!-- c --> &amp; </s> <s>',
    "▁underscore▁like▁ ▁",
    "Ġ Ċ are letters of the byte alphabet",
    "end with newline\n",
    "end with spaces   ",
    "\n  mixed \n\t \n  whitespace \n",
]

# Enough of every script for merges to form.
TRAINING_TEXTS = [text for text in HARD_TEXTS if text] * 4 + [
    "The quick brown fox jumps over the lazy dog, and they said it's the best thing in the world.",
    "return the value of the function if the value is not none else raise an error    indeed",
    "it was the best of times, it was the worst of times, 1789 and 1848 and 2024",
]
