// Evaluated on a page: is the body wider than its window, and because of what; which text is hard to read on its ground.
new Promise((done) => {
  const wanted = matchMedia("(prefers-color-scheme: dark)").matches ? "slate" : "default"
  const colors = () => document.body?.getAttribute("data-md-color-scheme") ?? wanted // pages other than the site's have none
  const settle = (left_ms) => { // the site's script sets the colors some time after loading
    if (colors() === wanted || left_ms <= 0) setTimeout(measure, SETTLE_MS)
    else setTimeout(() => settle(left_ms - 50), 50)
  }
  const measure = () => {
  const LEAST_CONTRAST = 3 // WCAG 2.2's bound for large text; code highlighting of the themes is between 3 and 4.5
  const MOST = 5
  const page = document.documentElement
  const name = (element) => element.tagName.toLowerCase() + (element.id ? "#" + element.id : "") +
    (typeof element.className === "string" && element.className ? "." + element.className.trim().split(/\s+/).join(".") : "")

  const scrolls = (element) => {
    for (let at = element.parentElement; at && at !== document.body; at = at.parentElement)
      if (getComputedStyle(at).overflowX !== "visible" || getComputedStyle(at).position === "fixed") return true
    return false
  }
  const visible = (element) => element.checkVisibility({ opacityProperty: true, visibilityProperty: true })
  const widest = [...document.body.querySelectorAll("*")]
    .filter((element) => element.getBoundingClientRect().right + scrollX > innerWidth + 1 && visible(element) && !scrolls(element))
    .slice(0, MOST).map(name)

  const parse = (color) => (color.match(/[\d.]+/g) || []).map(Number)
  const over = ([r, g, b, a = 1], below) => [r, g, b].map((part, i) => part * a + below[i] * (1 - a))
  const ground = (element) => {
    const layers = []
    for (let at = element; at; at = at.parentElement) {
      const style = getComputedStyle(at)
      if (style.backgroundImage !== "none") return null // a picture or gradient: not judged
      layers.push(parse(style.backgroundColor))
      if ((layers.at(-1)[3] ?? 1) === 1) break
    }
    const canvas = getComputedStyle(page).colorScheme.includes("dark") && matchMedia("(prefers-color-scheme: dark)").matches ? 18 : 255
    return layers.reverse().reduce((below, layer) => over(layer, below), [canvas, canvas, canvas])
  }
  const luminance = (color) => color.map((part) => part / 255)
    .map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4))
    .reduce((sum, part, i) => sum + part * [0.2126, 0.7152, 0.0722][i], 0)
  const contrast = (one, other) => {
    const [low, high] = [luminance(one), luminance(other)].sort((a, b) => a - b)
    return (high + 0.05) / (low + 0.05)
  }
  const faint = new Map()
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT)
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const element = node.parentElement
    const text = node.textContent.trim()
    if (text.length < 2 || element.closest("svg, script, style, noscript, [disabled]") || !visible(element)) continue
    const color = parse(getComputedStyle(element).color)
    const below = ground(element)
    if (!below || color.length < 3) continue
    const ratio = contrast(over(color, below), below)
    if (ratio < LEAST_CONTRAST && !faint.has(name(element)))
      faint.set(name(element), { where: name(element), text: text.slice(0, 40), contrast: ratio })
  }
  done({
    width_px: Math.max(page.scrollWidth, document.body.scrollWidth), window_px: innerWidth, widest,
    faint: [...faint.values()].sort((a, b) => a.contrast - b.contrast).slice(0, MOST),
    colors: colors() === wanted ? [] : [colors(), wanted],
  })
  }
  requestAnimationFrame(() => settle(COLORS_MS))
})
